"""Settings chosen on held-out data: `neurocoder tune split-mnist --workers 2`.

Every combination of values in an experiment's grids is run with several seeds; what came of it goes to tuned.json
beside the results, and the experiments take the best from there. What is not there comes from the package's own
tuned.json. Finished runs are skipped, as in a sweep.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from neurocoder_lab.results import deviation, dirty
from neurocoder_lab.store import LabError, make_folder, read_json, waiting_for, write_json
from neurocoder_lab.task import Config, Experiment, Grid

SEEDS = 3  # at least: one seed chose rates that blew up
FOLDER = "NEUROCODER_RESULTS"  # the environment's name for the folder of results
Row = dict[str, Any]


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


def best(experiment: str, setting: str, **place: Any) -> Any:
    """The value of the setting that was chosen at this place; None where none was tried."""
    for row in known():
        if row["experiment"] == experiment and row["place"] == place and setting in row["tried"][0]["values"]:
            return chosen(row)["values"][setting]
    return None


def chosen(row: Row) -> dict[str, Any]:
    """The values with the best mean; those of which a run failed, so that there are fewer, cannot be."""
    most = max(tried["n"] for tried in row["tried"])
    whole = [tried for tried in row["tried"] if tried["n"] == most]
    return (min if row["lower"] else max)(whole, key=lambda tried: tried["mean"])


def at_the_end(row: Row) -> list[str]:
    """Settings whose chosen value is the smallest or largest that was tried: a better one may lie beyond."""
    ends = []
    for name, value in chosen(row)["values"].items():
        values = {tried["values"][name] for tried in row["tried"]}
        numbers = not isinstance(value, str) and len(values) > 1
        ends += [name] if numbers and value in (min(values), max(values)) else []
    return ends


def known() -> list[Row]:
    """What was tuned: beside the results, and for the rest in the package."""
    ours = _read(folder() / "tuned.json")
    places = [_place(row) for row in ours]
    packaged = _read(Path(str(files("neurocoder_lab") / "tuned.json")))
    return ours + [row for row in packaged if _place(row) not in places]


def _place(row: Row) -> tuple[Any, ...]:
    return row["experiment"], row["place"], sorted(row["tried"][0]["values"])


def _read(file: Path) -> list[Row]:
    return _rows(file, file.stat().st_mtime_ns) if file.is_file() else []


@cache
def _rows(file: Path, changed: int) -> list[Row]:
    try:
        rows = read_json(file)
        whole = all({"experiment", "place", "lower"} <= row.keys() and row["tried"][0]["values"] for row in rows)
    except (LabError, TypeError, KeyError, IndexError, AttributeError):
        rows, whole = [], False
    if not whole:
        raise LabError(f"{file} is cut short, edited or from another version: remove it and tune again")
    return rows


def tune(
    experiment: Experiment,
    runs: Path,
    results: Path,
    seeds: int,
    workers: int,
    settings: tuple[str, ...] = (),
    axes: dict[str, tuple[Any, ...]] | None = None,
) -> None:
    """Run the experiment's grids, one after the other: a later one may build on what an earlier one found.

    Args:
        settings: grids that choose one of these; by default all.
        axes: the places to tune at, as values of axes; by default all.
    """
    if not experiment.grids:
        raise LabError(f"{experiment.name} has nothing to tune")
    wanted = [grid for grid in experiment.grids if not settings or grid.settings() & {*settings}]
    grids = [narrowed for grid in wanted if (narrowed := _narrowed(grid, axes or {})) is not None]
    if not grids:
        raise LabError(f"nothing to tune there: {'; '.join(map(_told, wanted))}")
    if seeds < SEEDS:
        raise LabError(f"tuning takes at least {SEEDS} seeds, got {seeds}: fewer choose by chance")
    make_folder(results)
    failed: dict[Config, str] = {}
    for grid in grids:
        with at(results):
            rows = _try(experiment, grid, runs, seeds, workers, failed)
        with waiting_for(results):
            places = [_place(row) for row in rows]
            others = [row for row in _read(results / "tuned.json") if _place(row) not in places]
            write_json(results / "tuned.json", others + rows)
        for row in rows:
            _tell(row)
    if failed:
        raise LabError(f"{len(failed)} runs failed: what they tried is not chosen")


def _narrowed(grid: Grid, axes: dict[str, tuple[Any, ...]]) -> Grid | None:
    """The grid at those of its places that have these values on the axes; None if none has."""
    for name, chosen_values in axes.items():
        if name not in grid.over and grid.fixed.get(name) not in chosen_values:
            return None
    over = {
        name: tuple(value for value in values if value in axes.get(name, values)) for name, values in grid.over.items()
    }
    return replace(grid, over=over) if all(over.values()) else None


def _told(grid: Grid) -> str:
    places = " ".join(f"--{name} {' '.join(map(str, values))}" for name, values in grid.over.items())
    return f"{' and '.join(sorted(grid.settings()))} for {places}"


def _try(
    experiment: Experiment, grid: Grid, runs: Path, seeds: int, workers: int, failed: dict[Config, str]
) -> list[Row]:
    """One row a place: what every combination of values gave there."""
    from neurocoder_lab.run import finished, folder_of
    from neurocoder_lab.sweep import sweep

    def configs(place: dict[str, Any], values: dict[str, Any]) -> list[Config]:
        return [
            experiment.resolve(experiment.config(seed=seed, **place, **across, **grid.fixed, **values))
            for seed in range(seeds)
            for across in _combinations(grid.across)
        ]

    tried = [
        (place, values, configs(place, values))
        for place in _combinations(grid.over)
        for values in _combinations(grid.values(place))
    ]
    for outcome in sweep(experiment, [config for *_, some in tried for config in some], runs, workers=workers):
        if outcome.error is not None:
            failed[outcome.config] = outcome.error
            print(f"failed: {experiment.label(outcome.config)}: {outcome.error}", file=sys.stderr)

    def measured(config: Config) -> float:
        lines = (folder_of(experiment, config, runs) / "metrics.jsonl").read_text().splitlines()
        return mean(json.loads(line)[grid.metric] for line in lines[-grid.last :])

    def commit(config: Config) -> str:
        environment = read_json(folder_of(experiment, config, runs) / "environment.json")
        return environment["commit"] + ("+" if dirty({"environment": environment}) else "")

    rows: list[Row] = []
    for place, values, some in tried:
        ended = [config for config in some if config not in failed and finished(experiment, config, runs) is not None]
        if not rows or rows[-1]["place"] != place:
            about = {"metric": grid.metric, "lower": grid.lower, "last": grid.last, "across": grid.across}
            rows.append({"experiment": experiment.name, "place": place, **about, "commits": [], "tried": []})
        scores = [measured(config) for config in ended]
        numbers = {"mean": round(mean(scores), 6), "std": round(deviation(scores), 6)} if scores else {}
        rows[-1]["tried"].append({"values": values, "n": len(scores)} | numbers)
        rows[-1]["commits"] = sorted({*rows[-1]["commits"], *map(commit, ended)})
    return [row for row in rows if any(tried["n"] for tried in row["tried"])]


def _combinations(values: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [dict(zip(values, some, strict=True)) for some in product(*values.values())]


def _tell(row: Row) -> None:
    """What was chosen where, out of what."""
    place = " ".join(map(str, row["place"].values()))
    best_of = chosen(row)
    print(f"{place}: {_values(best_of)}, {row['metric']} {best_of['mean']:.5g} ± {best_of['std']:.2g} ({best_of['n']})")
    for tried in row["tried"]:
        numbers = f"{tried['mean']:.5g} ± {tried['std']:.2g} ({tried['n']})" if tried["n"] else "failed"
        print(f"    {_values(tried)}: {numbers}")
    for name in at_the_end(row):
        print(f"    {name}: the chosen value is at the end of its grid: a better one may lie beyond")


def _values(tried: dict[str, Any]) -> str:
    return ", ".join(
        value if isinstance(value, str) else f"{name} {value:g}" for name, value in tried["values"].items()
    )
