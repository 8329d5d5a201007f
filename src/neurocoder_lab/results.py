"""From run folders to what is published: results/<experiment>.json, and means over seeds of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from neurocoder_lab.errors import LabError
from neurocoder_lab.provenance import dirty
from neurocoder_lab.store import make_folder, read_json, waiting_for, write_json

Curve = tuple[list[int], list[float], list[float]]  # steps, means, standard deviations
FORMAT = 1
PARTS = {"config", "final", "environment"}  # of a run, at least
REPAIR = "bring back the version you committed, or move it away and sweep again"
FOLDER = "NEUROCODER_RESULTS"  # the environment's name for the folder of results


def folder() -> Path:
    """Where results are, and what was tuned beside them."""
    return Path(os.environ.get(FOLDER, "results"))


@contextmanager
def at(results: Path) -> Iterator[None]:
    """What was tuned beside these results counts, here and in processes that are started here."""
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(results)
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER]
        else:
            os.environ[FOLDER] = before


class Runs(list):
    """Distilled runs: dicts with config, final, curve, seconds, environment."""

    def where(self, **settings: Any) -> Runs:
        """Those whose config has these values."""
        return Runs(run for run in self if all(run["config"].get(name) == value for name, value in settings.items()))

    def values(self, metric: str) -> list[float]:
        """The final metric of each run that has it."""
        return [run["final"][metric] for run in self if metric in run["final"]]

    def lowest(self, metric: str) -> list[float]:
        """The lowest that each run came to on its way."""
        return [min(run["curve"][metric]) for run in self if run["curve"].get(metric)]

    def precisions(self) -> list[str]:
        """Those they were trained in: full, or the kinds of mixed precision."""
        used = {run.get("environment", {}).get("precision", "no") for run in self}
        return sorted("full" if precision == "no" else precision for precision in used)

    def shown(self) -> str:
        """What a picture of them shows."""
        return "mean ± std over seeds" if len({run["config"]["seed"] for run in self}) > 1 else "one seed"

    def curve(self, metric: str) -> Curve | None:
        """Steps, mean and standard deviation over runs of equal length; None without runs."""
        curves = [run["curve"] for run in self if metric in run["curve"]]
        if not curves:
            return None
        steps = curves[0]["step"]
        columns = [*zip(*(curve[metric] for curve in curves if curve["step"] == steps), strict=True)]
        return steps, [mean(column) for column in columns], [deviation(column) for column in columns]

    def curves(self, metric: str, named: dict[str, dict[str, Any]]) -> dict[str, Curve]:
        """The curve of the runs with each name's settings; without the names of which there are no runs."""
        found = {name: self.where(**settings).curve(metric) for name, settings in named.items()}
        return {name: curve for name, curve in found.items() if curve is not None}


def deviation(values: Any) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def spread(values: list[float], digits: int = 4) -> str:
    """mean ± std (n), of one mean (1), or a dash."""
    if not values:
        return "-"
    return told(mean(values), deviation(values), len(values), digits)


def told(middle: float, std: float, count: int, digits: int = 4) -> str:
    around = f" ± {short(std, 2)}" if count > 1 else ""
    return f"{short(middle, digits)}{around} ({count})"


def short(number: float, digits: int = 4) -> str:
    """With so many digits, those before the point always among them; far from 1 by powers of ten."""
    return f"{number:.0f}" if 10**digits <= abs(number) < 10**6 else f"{number:.{digits}g}"


def identity(config: dict[str, Any]) -> str:
    """What makes two runs the same: their settings and seed."""
    return json.dumps(config, sort_keys=True)


def merge(results: Path, name: str, runs: list[dict[str, Any]]) -> Path:
    """Put the runs into results/<name>.json beside those that are there; one that is there already is replaced."""

    def together(known: Runs) -> list[dict[str, Any]]:
        again = {identity(run["config"]) for run in runs}
        return [*(run for run in known if identity(run["config"]) not in again), *runs]  # the latest come last

    return _change(results, name, together)


def replace(results: Path, name: str, runs: list[dict[str, Any]]) -> Path:
    """Write results/<name>.json anew: for what is counted all at once."""
    return _change(results, name, lambda known: runs)


def superseded(runs: Runs, axes: Iterable[str]) -> Runs:
    """Runs whose place on the axes and budget were run again later with other settings, whatever their seed.

    Runs of uncommitted code supersede none but their like.
    """

    def place(run: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(run["config"].get(name) for name in (*axes, "budget"))

    def settings(run: dict[str, Any]) -> str:
        return identity(run["config"] | {"seed": None})

    clean_last = sorted(runs, key=lambda run: dirty(run["environment"]), reverse=True)
    last = {place(run): settings(run) for run in clean_last}
    return Runs(run for run in runs if settings(run) != last[place(run)])


def retract(results: Path, name: str, gone: list[dict[str, Any]]) -> None:
    """Take runs out of results/<name>.json."""
    out = {identity(run["config"]) for run in gone}
    _change(results, name, lambda known: [run for run in known if identity(run["config"]) not in out])


def _change(results: Path, name: str, change: Callable[[Runs], list[dict[str, Any]]]) -> Path:
    """Replace a file of results by what becomes of it; others who change it at the same time wait for each other."""
    make_folder(results)
    target = results / f"{name}.json"
    with waiting_for(results):
        for left in results.glob(f".{name}.json.*"):  # by a process that was killed while it wrote
            left.unlink()
        runs = change(load(results, name, dirty_too=True))
        if runs:
            write_json(target, {"format": FORMAT, "experiment": name, "runs": runs})
        else:
            target.unlink(missing_ok=True)
    return target


def round_(value: float) -> float:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def load(results: Path, name: str, dirty_too: bool = False) -> Runs:
    """The published runs of an experiment, if any; those of uncommitted code only if asked for."""
    file = results / f"{name}.json"
    if not file.is_file():
        return Runs()
    try:
        content = read_json(file)
    except LabError:
        raise LabError(f"{file} is not whole JSON: it was cut short or edited; {REPAIR}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("runs"), list):
        raise LabError(f"{file} is from another version of the laboratory: {REPAIR}")
    if not all(isinstance(run, dict) and run.keys() >= PARTS for run in content["runs"]):
        raise LabError(f"{file} has runs without {', '.join(sorted(PARTS))}: it was edited; {REPAIR}")
    return Runs(run for run in content["runs"] if dirty_too or not dirty(run["environment"]))
