"""`neurocoder list`: the experiments."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from neurocoder_lab.experiments import CATALOGUE


def list_experiments() -> None:
    """The experiments, and what each reproduces."""
    table = Table("name", "reproduces", "what", box=None)
    for name, entry in CATALOGUE.items():
        table.add_row(name, entry.reproduces, entry.summary)
    Console().print(table)
    print("\nneurocoder run NAME --help shows the settings of one, neurocoder sweep NAME --help what it sweeps over")
