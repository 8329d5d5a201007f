"""`neurocoder claims`: what became of every claim."""

from __future__ import annotations

import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from neurocoder_lab.results import folder
from neurocoder_lab.signals import importing

if TYPE_CHECKING:
    from neurocoder_lab.claims import Judged

COLOURS = {
    "holds": "green",
    "contradicted": "red",
    "inconclusive": "yellow",
    "budget-too-short": "yellow",
    "not-run": "dim",
}


def claims(results: Path = folder(), json: bool = False, dirty: bool = False) -> None:
    """Every claim of both papers, and our own: their number, ours, and the verdict.

    Args:
        results: folder of results.
        json: print a list of objects for machines.
        dirty: take in runs of uncommitted code.
    """
    with importing():
        from neurocoder_lab.claims import judge, unclean

    judged = judge(results, dirty)
    left_out = 0 if dirty else unclean(results)
    if left_out:
        told = f"{left_out} runs in {results} were made by code with uncommitted changes: left out"
        print(f"{told} (--dirty takes them in)", file=sys.stderr)
    if json:
        print(dumps([asdict(claim) for claim in judged], indent=1))
    else:
        _show(judged)


def _show(judged: list[Judged]) -> None:
    table = Table("claim", "paper", "ours: mean ± std (n)", "budget", "verdict")
    for column in table.columns:
        column.overflow = "fold"
    table.columns[-1].no_wrap = True
    for claim in judged:
        paper = ", ".join(f"{name} {value}" for name, value in claim.paper.items() if not isinstance(value, dict))
        verdict = f"[{COLOURS[claim.verdict]}]{claim.verdict}[/]"
        table.add_row(f"[bold]{claim.id}[/]\n{claim.statement}", paper, claim.ours, claim.budget or "", verdict)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    verdicts = [claim.verdict for claim in judged]
    print(", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in COLOURS if verdict in verdicts))
