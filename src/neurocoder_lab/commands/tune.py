"""`neurocoder tune NAME`: settings chosen on held-out data."""

from __future__ import annotations

from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from neurocoder_lab import results
from neurocoder_lab.commands.options import RUNS, axes, option
from neurocoder_lab.errors import LabError
from neurocoder_lab.provenance import Precision

if TYPE_CHECKING:
    from neurocoder_lab.task import Experiment


def tune(experiment: Experiment, arguments: list[str]) -> int:
    from neurocoder_lab import search

    if not experiment.grids:
        raise LabError(f"{experiment.name} has nothing to tune")
    tunable = tuple(sorted({setting for grid in experiment.grids for setting in grid.settings()}))
    places = {name: experiment.axes[name] for grid in experiment.grids for name in grid.over}
    kind = make_dataclass(
        "Tune",
        [
            option("settings", tuple[Literal[tunable], ...], tunable, "What to choose."),
            *axes(places, {}),
            option("seeds", int, 3, "Seeds 0 to this, less one; at least three."),
            option("runs", Path, RUNS / "tuning", "Folder of the runs."),
            option("results", Path, results.folder(), "Folder of results, where tuned.json goes."),
            option("workers", int, 1, "Local processes, one thread each."),
            option("precision", Precision, "no", "Mixed precision."),
        ],
    )
    about = (
        "Choose settings on held-out data, for all later runs: they go to tuned.json beside the results, and what is "
        "there comes before what the package has."
    )
    args = tyro.cli(kind, prog=f"neurocoder tune {experiment.name}", description=about, args=arguments)
    # an axis that was left as it is narrows nothing: not every grid has all of its values
    narrowed = {name: getattr(args, name) for name, values in places.items() if getattr(args, name) != values}
    how = {"workers": args.workers, "precision": args.precision}
    search.tune(experiment, args.runs, args.results, args.seeds, args.settings, narrowed, **how)
    return 0
