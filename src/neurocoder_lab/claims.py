"""What became of every claim of both papers: papers.py has the claims, rules/ says how each is judged."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from neurocoder_lab import experiments, results
from neurocoder_lab.errors import LabError
from neurocoder_lab.evidence import Group, described, holm
from neurocoder_lab.papers import published
from neurocoder_lab.provenance import dirty
from neurocoder_lab.results import Runs, short, told
from neurocoder_lab.rules import COUNTED, LEVEL, Rule, Verdict, rules

BUDGETS = ("paper", "desk", "smoke")  # longest first


@dataclass(frozen=True)
class Judged:
    """A claim and what became of it here; p-values, of the claim and of its opposite, are corrected ones."""

    id: str
    source: str
    statement: str
    paper: dict[str, Any]
    verdict: Verdict
    ours: str
    n: int
    budget: str | None
    numbers: list[dict[str, Any]]
    p: float | None
    p_opposite: float | None
    rule: str
    experiment: str


def judge(folder: Path, dirty_too: bool = False) -> list[Judged]:
    """Every claim, judged by the results in the folder; runs of uncommitted code count only if asked for."""
    if not folder.is_dir():
        raise LabError(f"{folder} is no folder of results: neurocoder sweep makes one, or name another with --results")
    with results.at(folder):
        known = rules()
    sources = {rule.experiment for rule in known.values()}
    if not any((folder / f"{name}.json").is_file() for name in sources):
        raise LabError(f"{folder} holds no results: neurocoder sweep makes them, or name another folder with --results")
    every = {name: results.load(folder, name, dirty_too) for name in sources}
    for name in sources & {*experiments.NAMES}:
        old = results.superseded(every[name], experiments.get(name).axes)
        if old:
            words = f"neurocoder retract {name} --superseded --results {folder}"
            raise LabError(f"{len(old)} runs in {folder / name}.json were run again with other settings: {words}")
    found = {name: _chosen(rule, every.get(rule.experiment, Runs())) for name, rule in known.items()}
    known = {name: rule for name, (rule, _) in found.items()}
    chosen = {name: runs for name, (_, runs) in found.items()}
    corrected = _corrected(known, chosen)
    judged = []
    for claim in published():
        rule, runs = known[claim["id"]], chosen[claim["id"]]
        p, p_opposite = corrected.get(claim["id"], (None, None))
        verdict = _verdict(rule, runs, p, p_opposite)
        told = _told(rule, runs) if runs else _lacking(rule, every.get(rule.experiment, Runs()))
        counts = [len(group.runs(runs)) for group in rule.groups()]
        numbers = [group.numbers(runs) for group in rule.groups()] if runs else []
        budget = runs[0]["config"]["budget"] if runs else None
        judged.append(Judged(**claim, verdict=verdict, ours=told, n=min(counts), budget=budget, numbers=numbers,
                             p=p, p_opposite=p_opposite, rule=rule.how(), experiment=rule.experiment))  # fmt: skip
    return judged


def unclean(folder: Path) -> int:
    """How many runs in the folder were made by code with uncommitted changes."""
    every = [run for name in (*experiments.NAMES, *COUNTED) for run in results.load(folder, name, dirty_too=True)]
    return sum(dirty(run["environment"]) for run in every)


def _chosen(rule: Rule, runs: Runs) -> tuple[Rule, Runs]:
    """Runs of the longest budget at which every group has enough of them, else at which every group has some; and the
    rule or what stands instead of it, whichever they are there for.

    Where the rule names a setting, they share its value: the largest at which there are such runs.
    """
    *longer, smoke = BUDGETS
    either = [rule] if rule.instead is None else [rule, rule.instead]
    for enough, budgets in ((True, longer), (False, longer), (False, [smoke])):
        for budget, one in product(budgets, either):
            for chosen in _places(one, runs.where(budget=budget)):
                if chosen and all(len(group.runs(chosen)) >= (one.fewest if enough else 1) for group in one.groups()):
                    return one, chosen
    return either[-1], Runs()


def _places(rule: Rule, runs: Runs) -> list[Runs]:
    """What the rule may look at, first what it had rather: runs that it may compare."""
    if not rule.largest:
        return [runs]
    values = sorted({run["config"][rule.largest] for run in runs}, reverse=True)
    return [runs.where(**{rule.largest: value}) for value in values]


def _decidable(rule: Rule, runs: Runs) -> Verdict | None:
    """Why these runs cannot decide it; None where they can."""
    if not runs:
        return "not-run"
    if runs[0]["config"]["budget"] == "smoke" or not all(condition.holds(runs) for condition in rule.enough):
        return "budget-too-short"
    too_few = min(len(group.runs(runs)) for group in rule.groups()) < rule.fewest
    mixed = any(len(_precisions(groups, runs)) > 1 for groups in rule.compared())
    supposed = all(condition.holds(runs) for condition in rule.given)
    return "inconclusive" if too_few or mixed or not supposed else None


def _precisions(groups: list[Group], runs: Runs) -> list[str]:
    return Runs(run for group in groups for run in group.runs(runs)).precisions()


def _verdict(rule: Rule, runs: Runs, p: float | None, p_opposite: float | None) -> Verdict:
    """A claim without tests, and so without p-values, rests on its conditions alone."""
    undecided = _decidable(rule, runs)
    if undecided is not None:
        return undecided
    failed = [condition for condition in rule.conditions if not condition.holds(runs)]
    if (p_opposite is not None and p_opposite < LEVEL) or any(condition.sure for condition in failed):
        return "contradicted"
    return "inconclusive" if failed or (p is not None and p >= LEVEL) else "holds"


def _corrected(known: dict[str, Rule], chosen: dict[str, Runs]) -> dict[str, tuple[float, float]]:
    """p-values of each claim and of its opposite, corrected by Holm's method between the claims of a table."""
    tables: dict[str, dict[str, tuple[float, float]]] = {}
    for name, rule in known.items():
        if rule.tests and _decidable(rule, chosen[name]) is None:
            claimed, opposite = zip(*(test.p_values(chosen[name]) for test in rule.tests), strict=True)
            table = tables.setdefault(rule.table or rule.experiment, {})
            table[name] = max(claimed), min(1.0, len(opposite) * min(opposite))
    corrected = {}
    for table in tables.values():
        columns = [holm([*column]) for column in zip(*table.values(), strict=True)]
        corrected |= dict(zip(table, zip(*columns, strict=True), strict=True))
    return corrected


def _told(rule: Rule, runs: Runs) -> str:
    """What was measured: every tested group, those beside them, and what the conditions have to say."""
    beside = [group for group in rule.beside if group.runs(runs)]
    numbers = [group.numbers(runs) for group in (*rule.tested(), *beside)]
    parts = [_one(side, numbers) for side in numbers]
    parts += [part.tell(runs) for part in (*rule.tests, *rule.conditions, *rule.given, *rule.enough)]
    precisions = _precisions(rule.groups(), runs)
    parts += [f"precision {' and '.join(precisions)}"] if precisions != ["full"] else []
    return "; ".join(part for part in parts if part)


def _one(side: dict[str, Any], all_sides: list[dict[str, Any]]) -> str:
    """Its numbers, named by its model and by whatever else the sides differ in."""
    runs = side["runs"]
    differs = [name for name in runs if name == "model" or any(o["runs"].get(name) != runs[name] for o in all_sides)]
    name = described({name: runs[name] for name in differs})
    if any(other["metric"] != side["metric"] for other in all_sides):
        name = f"{side['metric']} of {name}"
    return f"{name} {told(side['mean'], side['std'], side['n'])}, best {short(side['best'])}"


def _lacking(rule: Rule, runs: Runs) -> str:
    """Which runs are not there, where others are."""
    lacking = [group for group in rule.groups() if not group.runs(runs)] if runs else []
    return f"no runs of {described(lacking[0].where)}" if lacking else ""
