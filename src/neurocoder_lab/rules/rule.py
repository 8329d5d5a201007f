"""What a rule is, and the pieces that most are made of.

A claim that needs several tests is their intersection: its p is the largest of them. It is contradicted where the
smallest opposite p, times the number of its tests, passes. Both are corrected by Holm's method between the claims of
one table. Every group of runs that is looked at has at least three.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

from neurocoder_lab.evidence import Compare, Condition, Group, Test, described, distinct
from neurocoder_lab.results import deviation

Verdict = Literal["holds", "contradicted", "inconclusive", "budget-too-short", "not-run"]
LEVEL, FEWEST = 0.05, 3


@dataclass(frozen=True)
class Rule:
    """How a claim is judged.

    Attributes:
        experiment: whose runs decide it.
        tests: all must pass.
        conditions: what else must be so, without a test.
        given: what the claim supposes; where it is not so, nothing is decided.
        enough: when its runs are long enough to decide it; runs of budget smoke never are.
        beside: groups that are reported and decide nothing.
        largest: a setting; runs with the largest of its values that every group has are looked at, and no others.
        table: claims of one table are corrected together; by default all of the experiment.
        fewest: runs that every group must have.
        note: what the words of tests and conditions leave unsaid.
        instead: what judges it where the runs that this rule asks for are not there.
    """

    experiment: str
    tests: tuple[Test, ...] = ()
    conditions: tuple[Condition, ...] = ()
    given: tuple[Condition, ...] = ()
    enough: tuple[Condition, ...] = ()
    beside: tuple[Group, ...] = ()
    largest: str = ""
    table: str = ""
    fewest: int = FEWEST
    note: str = ""
    instead: Rule | None = None

    def compared(self) -> list[list[Group]]:
        """What each test and each condition sets side by side."""
        conditions = (*self.conditions, *self.given, *self.enough)
        return [test.groups() for test in self.tests] + [condition.needs for condition in conditions]

    def groups(self) -> list[Group]:
        """Those that decide it, each once."""
        return distinct([group for groups in self.compared() for group in groups])

    def tested(self) -> list[Group]:
        return distinct([group for test in self.tests for group in test.groups()])

    def how(self) -> str:
        """The rule in words."""
        parts = [test.words() for test in self.tests] + [condition.words for condition in self.conditions]
        text = "; ".join(parts) + f"; n >= {self.fewest}"
        text += f", at the largest number of {self.largest} that all have" if self.largest else ""
        if self.tests:
            text += f"; one-sided tests, 5%, Holm between the claims of table {self.table or self.experiment}"
        given = " and ".join(condition.words for condition in self.given)
        text += f". Decided only where {given}" if given else ""
        text += f". {self.note}" if self.note else ""
        enough = " and ".join(condition.words for condition in self.enough)
        return f"{text}. Long enough: {enough or 'any budget but smoke'}."


def every(better: Iterable[Group], worse: Iterable[Group], **more: Any) -> tuple[Compare, ...]:
    """Each of the one against each of the other."""
    worse = [*worse]
    return tuple(Compare(b, w, **more) for b in better for w in worse)


def groups(metric: str, *models: str, lower: bool = False, **fixed: Any) -> list[Group]:
    return [Group({"model": model} | fixed, metric, lower=lower) for model in models]


def gain(better: Group, worse: Group, at_least: float = 0.0) -> Condition:
    """The gain in points is printed; it may have to reach something."""
    sign = -1 if better.lower else 1

    def gain(values: list[list[float]]) -> float:
        return sign * (mean(values[0]) - mean(values[1]))

    return Condition(
        f"a gain of at least {at_least:g} points" if at_least else "the gain is printed",
        [better, worse],
        lambda values: not at_least or gain(values) >= at_least,
        lambda values: f"gain {gain(values):+.2f} points",
    )


def steady(group: Group, other: Group, must: bool = True) -> Condition:
    """The spreads over the seeds are printed; the first may have to be no larger."""
    return Condition(
        f"{group.metric} spreads over the seeds no more than the other's" if must else "the spread is printed",
        [group, other],
        lambda values: not must or deviation(values[0]) <= deviation(values[1]),
        lambda values: f"{group.metric} spreads {deviation(values[0]):.2g} against {deviation(values[1]):.2g}",
    )


def no_larger(group: dict[str, Any], other: dict[str, Any], share: float = 1.0) -> Condition:
    """A count of parameters, in which chance plays no part."""
    name = described({name: value for name, value in other.items() if group.get(name) != value})
    return Condition(
        (f"at most {share:g} of the parameters" if share != 1 else "not more parameters") + f" of {name}",
        [Group(group, "parameters", lower=True), Group(other, "parameters", lower=True)],
        lambda values: max(values[0]) <= share * min(values[1]),
        lambda values: f"{max(values[0]):,.0f} parameters against {min(values[1]):,.0f} of {name}",
        sure=True,
    )
