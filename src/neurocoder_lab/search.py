"""Choose settings on held-out data: `neurocoder tune split-mnist --workers 2`.

Every combination of values in an experiment's grids is run with several seeds (on a ladder, those around the best);
what came of it goes to tuned.json beside the results. Finished runs are skipped, as in a sweep.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from neurocoder_lab import provenance
from neurocoder_lab.errors import LabError
from neurocoder_lab.results import at, deviation, told
from neurocoder_lab.run import finished, folder_of
from neurocoder_lab.store import make_folder, read_json, waiting_for, write_json
from neurocoder_lab.sweep import sweep
from neurocoder_lab.task import Config, Experiment, Grid
from neurocoder_lab.tuning import Row, at_the_end, chosen, place_of, read

SEEDS = 3  # at least: one seed chose rates that blew up


def tune(
    experiment: Experiment,
    runs: Path,
    results: Path,
    seeds: int,
    settings: tuple[str, ...] = (),
    axes: dict[str, tuple[Any, ...]] | None = None,
    **how: Any,
) -> None:
    """Run the experiment's grids, one after the other: a later one may build on what an earlier one found.

    Args:
        settings: grids that choose one of these; by default all.
        axes: the places to tune at, as values of axes; by default all.
        how: to run, as in `sweep.sweep`.
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
            rows = _try(experiment, grid, runs, seeds, how, failed)
        with waiting_for(results):
            places = [place_of(row) for row in rows]
            others = [row for row in read(results / "tuned.json") if place_of(row) not in places]
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
    places = " ".join(f"--{name.replace('_', '-')} {' '.join(map(str, values))}" for name, values in grid.over.items())
    return f"{' and '.join(sorted(grid.settings()))} for {places}"


def _try(
    experiment: Experiment, grid: Grid, runs: Path, seeds: int, how: dict[str, Any], failed: dict[Config, str]
) -> list[Row]:
    """One row a place: what every combination of values gave there."""

    def configs(place: dict[str, Any], values: dict[str, Any]) -> list[Config]:
        return [
            experiment.resolve(experiment.config(seed=seed, **place, **across, **grid.fixed, **values))
            for seed in range(seeds)
            for across in _combinations(grid.across)
        ]

    about = {name: getattr(grid, name) for name in ("metric", "lower", "last", "across", "fixed")}
    about |= {"precision": how["precision"]} if how.get("precision", "no") != "no" else {}
    rows: list[Row] = [
        {"experiment": experiment.name, "place": place, **about, "commits": [], "tried": []}
        for place in _combinations(grid.over)
    ]
    asked = [(row, values) for row in rows for values in _first(grid, row["place"])]
    while asked:
        tried = [(row, values, configs(row["place"], values)) for row, values in asked]
        for outcome in sweep(experiment, [config for *_, some in tried for config in some], runs, **how):
            if outcome.error is not None:
                failed[outcome.config] = outcome.error
                print(f"failed: {experiment.label(outcome.config)}: {outcome.error}", file=sys.stderr)
        for row, values, some in tried:
            ended = [
                config for config in some if config not in failed and finished(experiment, config, runs) is not None
            ]
            folders = [folder_of(experiment, config, runs) for config in ended]
            scores = [_measured(grid, folder) for folder in folders]
            numbers = {"mean": round(mean(scores), 6), "std": round(deviation(scores), 6)} if scores else {}
            row["tried"].append({"values": values, "n": len(scores)} | numbers)
            commits = {provenance.commit(read_json(folder / "environment.json")) for folder in folders}
            row["commits"] = sorted({*row["commits"], *commits})
        asked = [(row, values) for row in rows for values in _next(grid, row)]
    for row in rows:
        every = _combinations(grid.values(row["place"]))
        row["tried"].sort(key=lambda one, every=every: every.index(one["values"]))
    return [row for row in rows if any(tried["n"] for tried in row["tried"])]


def _first(grid: Grid, place: dict[str, Any]) -> list[dict[str, Any]]:
    """What is tried at a place before anything is known of it."""
    values = grid.values(place)
    return _combinations({name: _spread(some) for name, some in values.items()} if grid.ladder else values)


def _spread(values: tuple[Any, ...]) -> tuple[Any, ...]:
    middle, apart = len(values) // 2, len(values) // 4
    return (values[middle],) if len(values) < 5 else values[middle - apart : middle + apart + 1 : apart]


def _next(grid: Grid, row: Row) -> list[dict[str, Any]]:
    """On a ladder, what lies beside the best and was not tried yet; nothing where one of equals has its neighbours."""
    tried = [one["values"] for one in row["tried"]]
    if not grid.ladder or not any(one["n"] for one in row["tried"]):
        return []
    values = grid.values(row["place"])
    best = chosen(row)
    equals = [one["values"] for one in row["tried"] if one["n"] == best["n"] and one["mean"] == best["mean"]]
    left = [[other for other in _beside(values, one) if other not in tried] for one in equals]
    return min(left, key=len)


def _beside(values: dict[str, tuple[Any, ...]], one: dict[str, Any]) -> list[dict[str, Any]]:
    """One step up or down in one of the settings."""
    places = {name: some.index(one[name]) for name, some in values.items()}
    return [
        one | {name: values[name][place + step]}
        for name, place in places.items()
        for step in (-1, 1)
        if 0 <= place + step < len(values[name])
    ]


def _measured(grid: Grid, folder: Path) -> float:
    """The grid's metric of one run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return mean(json.loads(line)[grid.metric] for line in lines[-grid.last :])


def _combinations(values: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [dict(zip(values, some, strict=True)) for some in product(*values.values())]


def _tell(row: Row) -> None:
    """What was chosen where, out of what."""
    place = " ".join(map(str, row["place"].values()))
    best = chosen(row)
    print(f"{place}: {_values(best)}, {row['metric']} {told(best['mean'], best['std'], best['n'], 5)}")
    for tried in row["tried"]:
        numbers = told(tried["mean"], tried["std"], tried["n"], 5) if tried["n"] else "failed"
        print(f"    {_values(tried)}: {numbers}")
    for name in at_the_end(row):
        print(f"    {name}: the chosen value is at the end of its grid: a better one may lie beyond")


def _values(tried: dict[str, Any]) -> str:
    return ", ".join(
        value if isinstance(value, str) else f"{name} {value:g}" for name, value in tried["values"].items()
    )
