"""Every claim of both papers, and what became of it here.

claims.json holds the claims with the papers' numbers; rules.py says how each is judged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any

from neurocoder_lab import results
from neurocoder_lab.results import Runs, deviation
from neurocoder_lab.rules import FEWEST, LEVEL, Rule, Verdict, rules
from neurocoder_lab.store import LabError

BUDGETS = ("paper", "desk", "smoke")  # longest first


@dataclass(frozen=True)
class Judged:
    """A claim and what became of it here."""

    id: str
    source: str
    statement: str
    paper: dict[str, Any]
    verdict: Verdict
    ours: str
    n: int
    budget: str | None
    numbers: list[dict[str, Any]]
    rule: str
    experiment: str


def published() -> list[dict[str, Any]]:
    """The claims and the papers' numbers."""
    return json.loads((files("neurocoder_lab") / "claims.json").read_text())


def judge(folder: Path) -> list[Judged]:
    """Every claim, judged by the results in the folder."""
    if not folder.is_dir():
        raise LabError(f"{folder} is no folder of results: neurocoder sweep makes one, or name another with --results")
    known = rules()
    found_runs = {rule.experiment: results.load(folder, rule.experiment) for rule in known.values()}
    loaded = {name: _chosen(rule, found_runs[rule.experiment]) for name, rule in known.items()}
    corrected = _corrected(known, loaded)
    found = []
    for claim in published():
        name = claim["id"]
        rule, runs = known[name], loaded[name]
        verdict, ours = _verdict(name, rule, runs, corrected)
        ran = verdict != "not-run"
        if not ran and found_runs[rule.experiment]:
            lacking = [side for side in rule.sides() if not found_runs[rule.experiment].where(**side)]
            ours = f"no runs of {' '.join(map(str, lacking[0].values()))}" if lacking else ""
        n = min((len(runs.where(**side)) for side in rule.sides()), default=len(runs)) if ran else 0
        budget = runs[0]["config"]["budget"] if ran else None
        numbers = _numbers(rule, runs) if ran else []
        found.append(Judged(**claim, verdict=verdict, ours=ours, n=n, budget=budget, numbers=numbers, rule=rule.how,
                            experiment=rule.experiment))  # fmt: skip
    return found


def _chosen(rule: Rule, runs: Runs) -> Runs:
    """Runs of the longest budget at which every side has enough of them; else at which every side has some."""
    for fewest in (FEWEST, 1):
        for budget in BUDGETS:
            chosen = runs.where(budget=budget)
            if chosen and all(len(chosen.where(**side)) >= fewest for side in rule.sides()):
                return chosen
    return Runs()


def _verdict(
    name: str, rule: Rule, runs: Runs, corrected: dict[tuple[str, int], tuple[float, float]]
) -> tuple[Verdict, str]:
    if not runs:
        return "not-run", ""
    if rule.judge is not None:
        verdict, ours = rule.judge(runs)
    else:
        sides = _numbers(rule, runs)
        ours = "; ".join(_told(side, [other["runs"] for other in sides]) for side in sides)
        p_values = [corrected.get((name, place)) for place in range(len(rule.comparisons))]
        known = [p for p in p_values if p is not None]
        if any(against < LEVEL for _, against in known):
            verdict = "contradicted"
        elif len(known) == len(p_values) and all(claimed < LEVEL for claimed, _ in known):
            verdict = "holds"
        else:
            verdict = "inconclusive"
    mine = Runs(run for side in rule.sides() for run in runs.where(**side)) if rule.sides() else runs
    if runs[0]["config"]["budget"] == "smoke" or not rule.at_stake(mine):
        verdict = "budget-too-short"
    return verdict, ours


def _numbers(rule: Rule, runs: Runs) -> list[dict[str, Any]]:
    """What was measured of every side that is compared, each once."""
    found = []
    for comparison in rule.comparisons:
        for side in (comparison.better, comparison.worse):
            values = runs.where(**side).values(comparison.metric)
            best = (min if comparison.lower else max)(values)
            entry = {"runs": side, "metric": comparison.metric, "mean": mean(values), "std": deviation(values)}
            entry |= {"best": best, "n": len(values)}
            if entry not in found:
                found.append(entry)
    return found


def _told(side: dict[str, Any], all_sides: list[dict[str, Any]]) -> str:
    """Its numbers, named by its model and by whatever else the sides differ in."""
    runs = side["runs"]
    differs = [name for name in runs if name == "model" or any(other.get(name) != runs[name] for other in all_sides)]
    name = " ".join(str(runs[name]) for name in differs)
    return f"{name} {side['mean']:.4g} ± {side['std']:.2g} ({side['n']}), best {side['best']:.4g}"


def _corrected(known: dict[str, Rule], loaded: dict[str, Runs]) -> dict[tuple[str, int], tuple[float, float]]:
    """p-values of both directions, each corrected by Holm's method within its table."""
    tables: dict[str, dict[tuple[str, int], tuple[float, float]]] = {}
    for name, rule in known.items():
        for place, comparison in enumerate(rule.comparisons):
            p_values = comparison.p_values(loaded[name])
            if p_values is not None:
                tables.setdefault(rule.table or name, {})[name, place] = p_values
    corrected = {}
    for table in tables.values():
        keys = [*table]
        claimed, against = (holm([table[key][side] for key in keys]) for side in (0, 1))
        corrected |= dict(zip(keys, zip(claimed, against, strict=True), strict=True))
    return corrected


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction: the i-th smallest of m is multiplied by m - i, and none is below one before it."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected
