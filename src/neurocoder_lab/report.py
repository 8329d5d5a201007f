"""One self-contained HTML page: the claims first, then each experiment with tables and figures. No network needed."""

from __future__ import annotations

from importlib.resources import files
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


def _axes(experiment: Experiment, runs: Runs) -> str:
    """The options that restrict a sweep to what was run."""
    words = ""
    for name, values in experiment.axes.items():
        ran = [value for value in values if runs.where(**{name: value})]
        words += f" --{name} {' '.join(ran)}" if len(ran) < len(values) else ""
    return words


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
                "command": f"neurocoder sweep {experiment.name} --budget {budget} --seeds {seeds}"
                + _axes(experiment, runs),
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
