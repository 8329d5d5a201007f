"""One self-contained HTML page: the claims first, then each experiment with tables and figures. No network needed."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment

from neurocoder_lab import claims, experiments, results
from neurocoder_lab.results import Runs
from neurocoder_lab.rules import Verdict
from neurocoder_lab.run import source
from neurocoder_lab.store import make_folder, replacing
from neurocoder_lab.task import Experiment


def _commands(experiment: Experiment, runs: Runs) -> list[str]:
    """The sweeps that make these runs: grids on the axes, each with its number of seeds."""
    grids: dict[Any, int] = {}
    for run in runs:
        place = tuple((run["config"][name],) for name in experiment.axes)
        grids[place] = max(grids.get(place, 0), run["config"]["seed"] + 1)
    for axis, values in enumerate(experiment.axes.values()):  # join grids that differ on this axis alone
        joined: dict[Any, set[Any]] = {}
        for grid, seeds in grids.items():
            joined.setdefault((grid[:axis], grid[axis + 1 :], seeds), set()).update(grid[axis])
        grids = {
            (*before, tuple(value for value in values if value in found), *after): seeds
            for (before, after, seeds), found in joined.items()
        }
    found = []
    for grid, seeds in grids.items():
        words = f"neurocoder sweep {experiment.name} --budget {runs[0]['config']['budget']} --seeds {seeds}"
        for (name, values), ran in zip(experiment.axes.items(), grid, strict=True):
            words += f" --{name} {' '.join(map(str, ran))}" if ran != experiment.main.get(name, values) else ""
        found.append(words)
    return found


def _part(experiment: Experiment, runs: Runs, left_out: int, judged: list[claims.Judged]) -> dict[str, Any]:
    """What the page shows of the runs of one budget."""
    budget = runs[0]["config"]["budget"]
    seeds = len({run["config"]["seed"] for run in runs})
    hours = sum(run["seconds"] for run in runs) / 3600
    commits = sorted({run["environment"]["commit"] + ("+" if results.dirty(run) else "") for run in runs})
    about = f"{len(runs)} runs, {seeds} seeds, budget {budget}, {hours:.1f} core hours, commit {', '.join(commits)}, "
    about += f"torch {runs[0]['environment']['versions']['torch']}"
    if left_out:
        about += f"; {left_out} more runs, made by code with uncommitted changes, are left out"
    return {
        "experiment": experiment,
        "budget": budget,
        "about": about,
        "commands": _commands(experiment, runs),
        "tables": experiment.tables(runs),
        "figures": experiment.figures(runs),
        "claims": [claim for claim in judged if (claim.experiment, claim.budget) == (experiment.name, budget)],
    }


def write(folder: Path, out: Path, dirty: bool = False) -> Path:
    """Render the results in the folder, every budget that there is; returns the page."""
    judged = claims.judge(folder, dirty)
    shown, hidden = [], []
    for experiment in experiments.every():
        for budget in claims.BUDGETS:
            every = results.load(folder, experiment.name, dirty_too=True).where(budget=budget)
            runs = Runs(run for run in every if dirty or not results.dirty(run))
            if every and not runs:
                hidden.append(f"{experiment.name}, budget {budget}: {len(every)} runs")
            if runs:
                shown.append(_part(experiment, runs, len(every) - len(runs), judged))
    counts = [(verdict, sum(claim.verdict == verdict for claim in judged)) for verdict in get_args(Verdict)]
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (files("neurocoder_lab") / "report.html.jinja").read_text()
    )
    page = template.render(
        claims=judged, experiments=shown, counts=counts, source=source(), folder=folder, hidden=hidden
    )
    make_folder(out.parent)
    with replacing(out) as temporary:
        temporary.write_text(page)
    return out
