"""Settings chosen on held-out training data: `neurocoder tune split-mnist --workers 2`.

Every value of an experiment's grids is run once (seed 0, measured on every tenth training example), and its accuracy
goes to tuned.json; the experiments take the best from there. Finished runs are skipped, as in a sweep.
"""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from neurocoder_lab.store import LabError, write_json
from neurocoder_lab.task import Config, Experiment

FILE = Path(str(files("neurocoder_lab") / "tuned.json"))


def best(experiment: str, setting: str, **place: Any) -> float | None:
    """The value with the highest held-out accuracy at this place; None where none was tried."""
    for row in _known():
        if row["experiment"] == experiment and row["setting"] == setting and row["place"] == place:
            found = row["accuracy"]
            return float(max(found, key=found.__getitem__))
    return None


def _known() -> list[dict[str, Any]]:
    return json.loads(FILE.read_text()) if FILE.is_file() else []


def tune(experiment: Experiment, runs: Path, workers: int) -> None:
    """Run the experiment's grids, one after the other: a later one may build on what an earlier one found."""
    from neurocoder_lab.run import finished
    from neurocoder_lab.sweep import sweep

    if not experiment.grids:
        raise LabError(f"{experiment.name} has nothing to tune")
    failed = {}
    for grid in experiment.grids:
        tried: list[tuple[dict[str, Any], float, Config]] = []
        for place in grid.places():
            for value in grid.values(place):
                config = experiment.config(measure="validation", **place, **grid.fixed, **{grid.setting: value})
                tried.append((place, value, experiment.resolve(config)))
        for outcome in sweep(experiment, [config for _, _, config in tried], runs, workers=workers):
            if outcome.error is not None:
                failed[outcome.config] = outcome.error
                print(f"failed: {experiment.label(outcome.config)}: {outcome.error}", file=sys.stderr)
        rows = _known()
        for place in grid.places():
            about = {"experiment": experiment.name, "setting": grid.setting, "place": place}
            before = [row for row in rows if all(row[name] == value for name, value in about.items())]
            accuracy = dict(before[0]["accuracy"]) if before else {}  # of a run that fails, what was known of it stays
            for where, value, config in tried:
                if where == place and config not in failed:
                    accuracy[str(value)] = round(finished(experiment, config, runs)["final"]["accuracy"], 2)
            rows = [row for row in rows if row not in before]
            rows += [about | {"accuracy": accuracy}] if accuracy else []
        write_json(FILE, rows)
    for row in _known():
        if row["experiment"] == experiment.name:
            print(row["setting"], *row["place"].values(), row["accuracy"])
    if failed:
        raise LabError(f"{len(failed)} runs failed; of these {FILE.name} has nothing new")
