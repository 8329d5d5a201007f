"""What a claim can be judged by: groups of runs, tests with a p-value for either direction, and plain conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product
from math import isnan
from statistics import mean
from typing import Any

from scipy.stats import binomtest, spearmanr, ttest_1samp, ttest_ind

from neurocoder_lab.errors import LabError
from neurocoder_lab.results import Runs, deviation
from neurocoder_lab.task import Experiment


@dataclass(frozen=True)
class Group:
    """Runs that are selected by their config, and one number of each.

    Attributes:
        where: the values that their config has.
        metric: the final metric, or what `of` reads.
        of: from a run to its number, where that is not simply the final metric.
        lower: whether a lower number is better.
    """

    where: dict[str, Any]
    metric: str
    of: Callable[[dict[str, Any]], float] | None = None
    lower: bool = False

    def runs(self, runs: Runs) -> Runs:
        chosen = runs.where(**self.where)
        return Runs(run for run in chosen if self.metric in run["final"] or self.metric in run["curve"])

    def values(self, runs: Runs) -> list[float]:
        return [run["final"][self.metric] if self.of is None else self.of(run) for run in self.runs(runs)]

    def numbers(self, runs: Runs) -> dict[str, Any]:
        values = self.values(runs)
        best = (min if self.lower else max)(values)
        about = {"runs": self.where, "metric": self.metric if self.of is None else self.of.__name__.strip("_")}
        return about | {"mean": mean(values), "std": deviation(values), "best": best, "n": len(values)}


def distinct(groups: list[Group]) -> list[Group]:
    """Each once, in their order."""
    return [group for place, group in enumerate(groups) if group not in groups[:place]]


class Test:
    """Something that chance could bring about."""

    def groups(self) -> list[Group]:
        raise NotImplementedError

    def p_values(self, runs: Runs) -> tuple[float, float]:
        """Of the claimed direction, and of its opposite."""
        raise NotImplementedError

    def words(self) -> str:
        """What is claimed, for people."""
        raise NotImplementedError

    def tell(self, runs: Runs) -> str:
        """What was measured, beyond the numbers of the groups."""
        return ""


def _sure(ahead: float) -> tuple[float, float]:
    """Both p-values without any spread, and so without a t: what is measured, `ahead` of the limit or not, is sure."""
    return float(ahead <= 0), float(ahead >= 0)


def _both(p: float) -> tuple[float, float]:
    """Of a direction and of its opposite; a test that cannot tell, of one run or of equal ranks, shows neither."""
    return (1.0, 1.0) if isnan(p) else (p, 1 - p)


def welch(larger: list[float], smaller: list[float]) -> tuple[float, float]:
    """p-values of one-sided Welch tests that the first mean is the larger, and that it is the smaller."""
    if len({*larger}) == len({*smaller}) == 1:
        return _sure(larger[0] - smaller[0])
    return _both(float(ttest_ind(larger, smaller, equal_var=False, alternative="greater")[1]))


@dataclass(frozen=True)
class Compare(Test):
    """`better` is above `factor` * `worse` + `margin`, or below it where lower is better: a Welch test."""

    better: Group
    worse: Group
    factor: float = 1.0
    margin: float = 0.0

    def groups(self) -> list[Group]:
        return [self.better, self.worse]

    def p_values(self, runs: Runs) -> tuple[float, float]:
        better, worse = self.better.values(runs), self.worse.values(runs)
        worse = [self.factor * value + self.margin for value in worse]
        return welch(worse, better) if self.better.lower else welch(better, worse)

    def words(self) -> str:
        scaled = f"{self.factor:g} times " if self.factor != 1 else ""
        moved = f" {self.margin:+g}" if self.margin else ""
        names = [described(group.where) for group in self.groups()]
        side = "below" if self.better.lower else "above"
        other = f"'s {self.worse.metric}" if self.worse.metric != self.better.metric else ""
        return f"{self.better.metric} of {names[0]} {side} {scaled}{names[1]}{other}{moved}"


@dataclass(frozen=True)
class Bound(Test):
    """A mean is above `limit`, or below it where lower is better: a t test of one sample."""

    group: Group
    limit: float

    def groups(self) -> list[Group]:
        return [self.group]

    def p_values(self, runs: Runs) -> tuple[float, float]:
        values = self.group.values(runs)
        if len({*values}) == 1:
            return _sure((self.limit - values[0]) if self.group.lower else (values[0] - self.limit))
        direction = "less" if self.group.lower else "greater"
        return _both(float(ttest_1samp(values, self.limit, alternative=direction)[1]))

    def words(self) -> str:
        name = self.group.metric if self.group.of is None else self.group.of.__name__.strip("_")
        side = "below" if self.group.lower else "above"
        return f"{name} of {described(self.group.where)} {side} {self.limit:g} (t test of one sample)"


@dataclass(frozen=True)
class Falls(Test):
    """A number falls as an axis grows: Spearman's rank correlation over all runs, negative.

    There must be three places on the axis at least, with three runs each.
    """

    group: Group
    axis: str

    def groups(self) -> list[Group]:
        return [self.group]

    def p_values(self, runs: Runs) -> tuple[float, float]:
        places = [run["config"][self.axis] for run in self.group.runs(runs)]
        if len({*places}) < 3 or min(map(places.count, places)) < 3:
            return 1.0, 1.0
        return _both(float(spearmanr(places, self.group.values(runs), alternative="less")[1]))

    def words(self) -> str:
        return f"{self.group.metric} of {described(self.group.where)} falls as {self.axis} grows (Spearman)"

    def tell(self, runs: Runs) -> str:
        places = [run["config"][self.axis] for run in self.group.runs(runs)]
        return f"rank correlation with {self.axis} {float(spearmanr(places, self.group.values(runs))[0]):.2f}"


@dataclass(frozen=True)
class NineOfTen(Test):
    """Nine of ten runs are good in the sample; the opposite is that fewer are in the long run: a binomial test.

    Attributes:
        what: what a good run has.
        needs: groups of the same runs, one a number.
        good: from a run's numbers to whether it is good.
    """

    what: str
    needs: list[Group]
    good: Callable[..., bool]

    def groups(self) -> list[Group]:
        return self.needs

    def _count(self, runs: Runs) -> tuple[int, int]:
        rows = [*zip(*(group.values(runs) for group in self.needs), strict=True)]
        return sum(self.good(*row) for row in rows), len(rows)

    def p_values(self, runs: Runs) -> tuple[float, float]:
        good, all_ = self._count(runs)
        opposite = binomtest(good, all_, 0.9, alternative="less").pvalue
        return (0.0, 1.0) if good >= 0.9 * all_ else (1.0, float(opposite))

    def words(self) -> str:
        return f"{self.what} in nine of ten runs (contradicted by a binomial test)"

    def tell(self, runs: Runs) -> str:
        return "{} of {} runs".format(*self._count(runs))


@dataclass(frozen=True)
class Condition:
    """Something that is measured and compared without a test.

    Attributes:
        words: what must be so.
        needs: the groups it looks at.
        check: from the values of each group to whether it is so.
        told: from these to what is printed of it.
        sure: chance plays no part in it: where it is not so, the claim is contradicted.
    """

    words: str
    needs: list[Group]
    check: Callable[[list[list[float]]], bool]
    told: Callable[[list[list[float]]], str] | None = None
    sure: bool = False

    def holds(self, runs: Runs) -> bool:
        return self.check([group.values(runs) for group in self.needs])

    def tell(self, runs: Runs) -> str:
        return "" if self.told is None else self.told([group.values(runs) for group in self.needs])


def described(where: dict[str, Any]) -> str:
    """The values, and what they are values of where words do not tell."""
    parts = [value if isinstance(value, str) else f"{name} {value:g}" for name, value in where.items()]
    return " ".join(parts) or "all"


def unknown(group: Group, experiment: Experiment) -> str | None:
    """What a group names that the experiment does not have: a field, a value, a metric; None where all is there."""
    known = {field.name for field in fields(experiment.config)}
    odd = sorted(group.where.keys() - known)
    if odd:
        return f"{experiment.name} has no setting {odd[0]!r}"
    if group.metric not in experiment.metrics:
        return f"{experiment.name} measures no {group.metric!r}"
    for values in product(*experiment.axes.values()):
        try:
            config = experiment.resolve(experiment.config(**dict(zip(experiment.axes, values, strict=True))))
        except LabError:  # axes that do not go together
            continue
        if all(getattr(config, name) == value for name, value in group.where.items()):
            return None
    return f"no run of {experiment.name} is {described(group.where)}"


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction: the i-th smallest of m is multiplied by m - i, and none is below one before it."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected
