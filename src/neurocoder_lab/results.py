"""From run folders to what is published: results/<experiment>.json, and means over seeds of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from neurocoder_lab.store import LabError, make_folder, read_json, write_json
from neurocoder_lab.task import Experiment, as_dict

FORMAT = 1


class Runs(list):
    """Distilled runs: dicts with config, final, curve, seconds, environment."""

    def where(self, **settings: Any) -> Runs:
        """Those whose config has these values."""
        return Runs(run for run in self if all(run["config"].get(name) == value for name, value in settings.items()))

    def values(self, metric: str) -> list[float]:
        """The final metric of each run that has it."""
        return [run["final"][metric] for run in self if metric in run["final"]]

    def curve(self, metric: str) -> tuple[list[int], list[float], list[float]] | None:
        """Steps, mean and standard deviation over runs of equal length; None without runs."""
        curves = [run["curve"] for run in self if metric in run["curve"]]
        if not curves:
            return None
        steps = curves[0]["step"]
        columns = [*zip(*(curve[metric] for curve in curves if curve["step"] == steps), strict=True)]
        return steps, [mean(column) for column in columns], [deviation(column) for column in columns]


def deviation(values: Any) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def spread(values: list[float], digits: int = 4) -> str:
    """mean ± std (n), or a dash."""
    if not values:
        return "-"
    return f"{mean(values):.{digits}g} ± {deviation(values):.2g} ({len(values)})"


def distil(experiment: Experiment, runs: Path, results: Path) -> Path:
    """Write what every finished run of the experiment found to results/<experiment>.json; returns the file.

    Runs with settings of their own, such as another learning rate, are left out: they may not be compared.
    """
    found = []
    for file in sorted((runs / experiment.name).glob("*/seed-*/result.json")):
        folder = file.parent
        try:
            config = experiment.config(**read_json(folder / "config.json")["config"])
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            final = read_json(file)
        except (LabError, TypeError, KeyError, OSError, ValueError) as error:
            print(f"left out {folder}: {error}", file=sys.stderr)
            continue
        if not experiment.standard(config):
            continue
        curve = {name: [round_(row[name]) for row in rows] for name in rows[0]} if rows else {}
        found.append(
            {
                "config": as_dict(config),
                "final": final["final"],
                "seconds": final["seconds"],
                "curve": curve,
                "environment": read_json(folder / "environment.json"),
            }
        )
    if not found:
        raise LabError(f"no finished run of {experiment.name} under {runs}")
    return write(results, experiment.name, found)


def write(results: Path, name: str, runs: list[dict[str, Any]]) -> Path:
    make_folder(results)
    target = results / f"{name}.json"
    write_json(target, {"format": FORMAT, "experiment": name, "runs": runs})
    return target


def round_(value: float) -> float:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def load(results: Path, name: str) -> Runs:
    """The published runs of an experiment; none if its file is not there."""
    file = results / f"{name}.json"
    if not file.is_file():
        return Runs()
    try:
        content = read_json(file)
    except LabError:
        raise LabError(f"{file} is not whole JSON: it was cut short or edited; remove it and sweep again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise LabError(f"{file} is from another version of the laboratory")
    return Runs(content["runs"])
