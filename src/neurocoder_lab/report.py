"""One self-contained HTML page: the claims first, then each experiment with tables and figures. No network needed."""

from __future__ import annotations

from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment

from neurocoder_lab import claims, experiments, provenance, results, speed
from neurocoder_lab.results import Runs
from neurocoder_lab.rules import Verdict
from neurocoder_lab.store import make_folder, replacing
from neurocoder_lab.task import Experiment


def _part(experiment: Experiment, runs: Runs, left_out: int, judged: list[claims.Judged]) -> dict[str, Any]:
    """What the page shows of the runs of one budget."""
    budget = runs[0]["config"]["budget"]
    seeds = len({run["config"]["seed"] for run in runs})
    hours = sum(run["seconds"] for run in runs) / 3600
    commits = sorted({provenance.commit(run["environment"]) for run in runs})
    about = f"{len(runs)} runs, {seeds} seeds, budget {budget}, {hours:.1f} core hours, commit {', '.join(commits)}, "
    about += f"torch {runs[0]['environment']['versions']['torch']}"
    mixed = [kind for run in runs if (kind := run["environment"].get("precision", "no")) != "no"]
    about += f"; {len(mixed)} of them in {' and '.join(sorted({*mixed}))}" if mixed else ""
    data = {(run["config"].get("dataset"), run["environment"].get("data")) for run in runs}
    if len(data) > len({dataset for dataset, _ in data}):
        about += "; not all of them had the same data"
    if left_out:
        about += f"; {left_out} more runs, made by code with uncommitted changes, are left out"
    return {
        "experiment": experiment,
        "entry": experiments.CATALOGUE[experiment.name],
        "budget": budget,
        "about": about,
        "commands": [*dict.fromkeys(run["command"] for run in runs if "command" in run)],
        "tables": experiment.tables(runs),
        "figures": experiment.figures(runs),
        "claims": [claim for claim in judged if (claim.experiment, claim.budget) == (experiment.name, budget)],
    }


def write(folder: Path, out: Path, dirty: bool = False) -> Path:
    """Render the results in the folder, every budget that there is; returns the page."""
    judged = claims.judge(folder, dirty)
    shown, hidden = [], []
    for experiment, budget in product(experiments.every(), claims.BUDGETS):
        every = results.load(folder, experiment.name, dirty_too=True).where(budget=budget)
        runs = Runs(run for run in every if dirty or not provenance.dirty(run["environment"]))
        if every and not runs:
            hidden.append(f"{experiment.name}, budget {budget}: {len(every)} runs")
        if runs:
            with results.at(folder):  # what was tuned lies beside them
                shown.append(_part(experiment, runs, len(every) - len(runs), judged))
    counts = [(verdict, sum(claim.verdict == verdict for claim in judged)) for verdict in get_args(Verdict)]
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (files("neurocoder_lab") / "report.html.jinja").read_text()
    )
    timed = results.load(folder, "speed", dirty)
    page = template.render(
        claims=judged,
        experiments=shown,
        counts=counts,
        source=provenance.source(),
        folder=folder,
        hidden=hidden,
        speed=speed.tabulate(timed) if timed else None,
    )
    make_folder(out.parent)
    with replacing(out) as temporary:
        temporary.write_text(page)
    return out
