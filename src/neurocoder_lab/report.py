"""One self-contained HTML page: the claims first, then each experiment with tables and figures. No network needed."""

from __future__ import annotations

from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import get_args

from jinja2 import Environment

from neurocoder_lab import claims, experiments, results
from neurocoder_lab.results import Runs
from neurocoder_lab.rules import Verdict
from neurocoder_lab.run import source
from neurocoder_lab.store import make_folder, replacing
from neurocoder_lab.task import Experiment


def _of_one_budget(runs: Runs) -> Runs:
    """Those of the budget with the most runs; of equals, the longest."""
    return max((runs.where(budget=budget) for budget in claims.BUDGETS), key=len)


def _commands(experiment: Experiment, runs: Runs) -> list[str]:
    """The sweeps that make these runs: one for each place on the axes of which a sweep takes one value by default."""
    single = [name for name, values in experiment.main.items() if len(values) == 1]
    found = []
    for place in product(*(experiment.axes[name] for name in single)):
        mine = runs.where(**dict(zip(single, place, strict=True)))
        if not mine:
            continue
        seeds = len({run["config"]["seed"] for run in mine})
        words = f"neurocoder sweep {experiment.name} --budget {mine[0]['config']['budget']} --seeds {seeds}"
        for name, values in experiment.axes.items():
            ran = tuple(value for value in values if mine.where(**{name: value}))
            words += f" --{name} {' '.join(map(str, ran))}" if ran != experiment.main.get(name, values) else ""
        found.append(words)
    return found


def write(folder: Path, out: Path) -> Path:
    """Render the results in the folder; returns the page."""
    judged = claims.judge(folder)
    shown = []
    for experiment in experiments.every():
        runs = _of_one_budget(results.load(folder, experiment.name))
        if not runs:
            continue
        budget = runs[0]["config"]["budget"]
        seeds = len({run["config"]["seed"] for run in runs})
        hours = sum(run["seconds"] for run in runs) / 3600
        commits = sorted({run["environment"]["commit"] + ("+" if run["environment"]["dirty"] else "") for run in runs})
        shown.append(
            {
                "experiment": experiment,
                "about": f"{len(runs)} runs, {seeds} seeds, budget {budget}, {hours:.1f} core hours, "
                f"commit {', '.join(commits)}, torch {runs[0]['environment']['versions']['torch']}",
                "commands": _commands(experiment, runs),
                "tables": experiment.tables(runs),
                "figures": experiment.figures(runs),
                "claims": [claim for claim in judged if claim.experiment == experiment.name],
            }
        )
    counts = [(verdict, sum(claim.verdict == verdict for claim in judged)) for verdict in get_args(Verdict)]
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (files("neurocoder_lab") / "report.html.jinja").read_text()
    )
    page = template.render(claims=judged, experiments=shown, counts=counts, source=source(), folder=folder)
    make_folder(out.parent)
    with replacing(out) as temporary:
        temporary.write_text(page)
    return out
