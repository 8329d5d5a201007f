"""Every claim of both papers: which experiment decides it, by which rule, and what it decided.

claims.json holds the claims with the papers' numbers; `rules` says how each is judged. A comparison is a one-sided
Welch test at 5%, with Holm's correction over all comparisons of its table, and at least three runs on either side.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from scipy.stats import ttest_1samp, ttest_ind

from neurocoder_lab import results
from neurocoder_lab.results import Runs, deviation, spread
from neurocoder_lab.store import LabError

Verdict = Literal["holds", "contradicted", "inconclusive", "budget-too-short", "not-run"]
LEVEL, FEWEST = 0.05, 3
BUDGETS = ("paper", "desk", "smoke")  # the first that has runs is judged


@dataclass(frozen=True)
class Comparison:
    """`better` has a lower (or higher) metric than `worse`; both select runs by their config."""

    metric: str
    better: dict[str, Any]
    worse: dict[str, Any]
    lower: bool = False

    def p_values(self, runs: Runs) -> tuple[float, float] | None:
        """Of the claimed direction and of its opposite; None where there are too few runs."""
        better, worse = (runs.where(**side).values(self.metric) for side in (self.better, self.worse))
        if min(len(better), len(worse)) < FEWEST:
            return None
        if len({*better, *worse}) == 1:
            return 1.0, 1.0
        claimed = welch(worse, better) if self.lower else welch(better, worse)
        return claimed, 1 - claimed


@dataclass(frozen=True)
class Rule:
    """How a claim is judged.

    Attributes:
        experiment: whose runs decide it.
        how: the rule in words.
        comparisons: all must hold; one that is significant the other way contradicts.
        table: comparisons of one table are corrected together.
        judge: for claims that are no comparison, from runs to a verdict and what was found.
        needs: for those, the groups of runs it looks at.
        at_stake: whether the runs were long enough for the claim to be decided by them.
    """

    experiment: str
    how: str
    comparisons: tuple[Comparison, ...] = ()
    table: str = ""
    judge: Callable[[Runs], tuple[Verdict, str]] | None = None
    needs: tuple[dict[str, Any], ...] = ()
    at_stake: Callable[[Runs], bool] = lambda runs: True

    def sides(self) -> list[dict[str, Any]]:
        """The groups of runs that decide it."""
        return [*self.needs, *(side for c in self.comparisons for side in (c.better, c.worse))]


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
    loaded = {name: _chosen(rule, results.load(folder, rule.experiment)) for name, rule in known.items()}
    corrected = _corrected(known, loaded)
    found = []
    for claim in published():
        name = claim["id"]
        rule, runs = known[name], loaded[name]
        verdict, ours = _verdict(name, rule, runs, corrected)
        ran = verdict != "not-run"
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
        ours = "; ".join(_told(side) for side in _numbers(rule, runs))
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


def _told(side: dict[str, Any]) -> str:
    name = side["runs"].get("model", " ".join(map(str, side["runs"].values())))
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


def welch(larger: list[float], smaller: list[float]) -> float:
    """p-value of a one-sided Welch test that the first mean is the larger."""
    _, p = ttest_ind(larger, smaller, equal_var=False, alternative="greater")
    return float(p)


def holm(p_values: list[float]) -> list[float]:
    """Holm's correction: the i-th smallest of m is multiplied by m - i, and none is below one before it."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


WELCH = "one-sided Welch test, 5%, Holm within the table, n >= 3"


def compare(
    experiment: str, table: str, metric: str, better: list[dict], worse: list[dict], lower: bool, **more: Any
) -> Rule:
    """Each of `better` against each of `worse`."""
    pairs = tuple(Comparison(metric, b, w, lower) for b in better for w in worse)
    direction = "lower" if lower else "higher"
    names = [" and ".join(" ".join(map(str, side.values())) for side in sides) for sides in (better, worse)]
    return Rule(experiment, f"{metric} of {names[0]} {direction} than of {names[1]}: {WELCH}", pairs, table, **more)


def _models(*names: str, **fixed: Any) -> list[dict[str, Any]]:
    return [{"model": name} | fixed for name in names]


def rules() -> dict[str, Rule]:
    """The rule of every claim, by its id."""
    return _general() | _polynomial() | _images() | _sequences() | _continual() | _modular()


def _general() -> dict[str, Rule]:
    cifar = _models("mlp-neurocoder", dataset="cifar10")
    return {
        "nc-params": Rule("parameters", "every cell whose widths the paper gives within 5%", judge=_parameters),
        "nc-overhead": compare("speed", "speed", "step_seconds", _models("neurocoder"), _models("moe", "nsm"), True),
        "nc-overhead-light": compare(
            "speed", "speed", "step_seconds", _models("neurocoder"), _models("hypernet", "film"), True
        ),
        "nc-cifar-size": compare(
            "cifar", "cifar", "test", cifar, _models("mlp-moe", "mlp-nsm", dataset="cifar10"), False
        ),
    }


def _parameters(runs: Runs) -> tuple[Verdict, str]:
    known = runs.where(follows=True)
    away = {f"{run['config']['task']} {run['config']['model']}": run["final"]["away"] for run in known}
    worst = max(away, key=lambda name: abs(away[name]))
    inside = sum(abs(value) <= 0.05 for value in away.values())
    return (
        "holds" if inside == len(away) else "contradicted"
    ), f"{inside} of {len(away)} within 5%; {worst} {away[worst]:+.1%}"


def _polynomial() -> dict[str, Rule]:
    both, rivals = ("neurocoder-single", "neurocoder-multi"), ("linear", "hypernet", "film")
    found = {
        f"nc-poly-{setting}": compare(
            "polynomial", "polynomial", "test", _models(*both, setting=setting),
            _models(*rivals, setting=setting), True, at_stake=_learned,
        )
        for setting in ("plain", "noise", "double")
    }  # fmt: skip
    multi, plain = _models("neurocoder-multi", setting="plain"), {"setting": "plain"}
    return found | {
        "nc-poly-multi": compare(
            "polynomial", "polynomial", "test", multi, _models("neurocoder-single", **plain), True, at_stake=_learned
        ),
        "nc-poly-usage": compare(
            "polynomial",
            "polynomial",
            "test",
            multi,
            _models("neurocoder-multi-no-usage", **plain),
            True,
            at_stake=_learned,
        ),
        "nc-poly-speed": Rule(
            "polynomial",
            "mean curve of multi-step within 10% of its final error by step 2,000; in runs of at least 10,000 steps, "
            "that of the plain head not before step 9,000; n >= 3",
            judge=_speed,
            needs=(multi[0], *_models("linear", **plain)),
        ),
        "nc-poly-boundaries": Rule(
            "polynomial",
            "attention of multi-step to the first component changes more at chunk boundaries than inside of chunks "
            "(ratio above 1: one-sided t test, 5%), and by a larger ratio than single-step's (one-sided Welch test, "
            "5%); n >= 3",
            judge=_boundaries,
            needs=(multi[0], *_models("neurocoder-single", **plain)),
        ),
    }


def _learned(runs: Runs) -> bool:
    """Whether some model explains a tenth of the variance of its targets: below that nothing was learned."""
    return any(run["final"]["test"] < 0.9 * run["final"]["target_variance"] for run in runs)


def _converged(curve: tuple[list[int], list[float], list[float]]) -> int:
    """The step from which the mean stays within 10% of its last value."""
    steps, means, _ = curve
    late = [step for step, value in zip(steps, means, strict=True) if value > 1.1 * means[-1]]
    return late[-1] if late else 0


def _speed(runs: Runs) -> tuple[Verdict, str]:
    multi, plain = (
        runs.where(setting="plain", model=model).curve("validation") for model in ("neurocoder-multi", "linear")
    )
    if multi is None or plain is None:
        return "not-run", ""
    ours = f"of {multi[0][-1]:,} steps, within 10% of the final error from step {_converged(multi):,} (multi-step), "
    ours += f"{_converged(plain):,} (plain) on"
    if len(runs.where(setting="plain", model="neurocoder-multi")) < FEWEST:
        return "inconclusive", ours
    if _converged(multi) > 2000:
        return "contradicted", ours
    if multi[0][-1] < 10_000:
        return "budget-too-short", ours
    return ("holds" if _converged(plain) >= 9_000 else "contradicted"), ours


def _boundaries(runs: Runs) -> tuple[Verdict, str]:
    multi, single = (
        runs.where(setting="plain", model=f"neurocoder-{kind}").values("boundary_ratio") for kind in ("multi", "single")
    )
    if not multi or not single:
        return "not-run", ""
    ours = f"change at boundaries / inside: multi-step {spread(multi, 3)}, single-step {spread(single, 3)}"
    if min(len(multi), len(single)) < FEWEST:
        return "inconclusive", ours
    _, above = ttest_1samp(multi, 1.0, alternative="greater")
    p_values = float(above), welch(multi, single)
    if max(p_values) > 1 - LEVEL:
        return "contradicted", ours
    return ("holds" if max(p_values) < LEVEL else "inconclusive"), ours


def _images() -> dict[str, Rule]:
    found = {
        "nc-mnist-error": compare(
            "mnist-linear", "mnist", "test_error", _models("neurocoder-5"), _models("linear"), True
        ),
        "nc-mnist-steps": compare(
            "mnist-linear", "mnist", "test_error", _models("neurocoder-10"), _models("neurocoder-1"), True
        ),
        "nc-mnist-patterns": compare(
            "mnist-linear", "mnist-patterns", "patterns", _models("neurocoder-5"), _models("neurocoder-1"), False
        ),
        "nc-mnist-tree": compare(
            "mnist-linear", "mnist-tree", "tree_purity", _models("neurocoder-5"), _models("shuffled"), False
        ),
    }
    for dataset in ("cifar10", "cifar100"):
        for network in ("mlp", "lenet", "densenet"):
            ours, others = (
                _models(*(f"{network}-{kind}" for kind in kinds), dataset=dataset)
                for kinds in (("neurocoder",), ("original", "moe", "nsm"))
            )
            found[f"nc-{dataset}-{network}"] = compare("cifar", "cifar", "test", ours, others, False)
    return found


def _sequences() -> dict[str, Rule]:
    found = {
        f"nc-atari-{game}": compare(
            "atari", "atari", "score", _models("neurocoder", game=game), _models("a3c", "hypernet", game=game), False
        )
        for game in ("seaquest", "mspacman", "frostbite", "montezuma")
    }
    others = _models("ntm", "nsm", "film", "hypernet")
    found["nc-algo-train"] = compare("algorithms", "algorithms", "bit_error", _models("neurocoder"), others, True)
    found["nc-algo-test"] = compare(
        "algorithms", "algorithms-test", "test_bit_error", _models("neurocoder"), others, True
    )
    return found


def _continual() -> dict[str, Rule]:
    found = {}
    for scenario in ("task", "domain"):
        for method in ("adam", "adagrad", "l2", "si", "ewc", "oewc"):
            fixed = {"scenario": scenario, "method": method, "hidden": 256, "strength": "benchmark"}
            found[f"nc-split-mnist-{scenario}-{method}"] = compare(
                "split-mnist", f"split-mnist-{scenario}", "accuracy", _models("neurocoder", **fixed),
                _models("mlp", "nsm", **fixed), False,
            )  # fmt: skip
    for dataset in ("cifar10", "cifar100"):
        for method, ending in (("none", ""), ("si", "-si")):
            fixed = {"dataset": dataset, "method": method}
            found[f"nc-split-{dataset}{ending}"] = compare(
                "split-cifar", "split-cifar", "accuracy", _models("neurocoder", orthogonal=10.0, **fixed),
                _models("plain", **fixed), False,
            )  # fmt: skip
    stressed, little = (_models("neurocoder", orthogonal=a, dataset="cifar10", method="none") for a in (10.0, 0.1))
    found["nc-split-cifar-orthogonal"] = compare("split-cifar", "split-cifar", "accuracy", stressed, little, False)
    return found


def _modular() -> dict[str, Rule]:
    toy = _models("em", setting="separate")
    ptb = [{"method": "em", "modules": modules, "choices": 1} for modules in (5, 15)]
    fixed = [{"method": "baseline", "modules": modules} for modules in (1, 3)]
    pairs = tuple(
        Comparison(
            "test_perplexity", *({"method": method, "modules": m, "choices": k} for method in ("em", "reinforce")), True
        )
        for m in (5, 15)
        for k in (1, 3)
    )
    top_k = tuple(
        Comparison(
            "test_perplexity", *({"method": method, "modules": m, "choices": 1} for method in ("em", "topk")), True
        )
        for m in (5, 15)
    )
    return {
        "mn-toy": Rule(
            "toy-regression", "loss below 1e-3 of the variance, H_a < 0.05, H_b > 0.65 in 9 of 10 runs", judge=_toy
        ),
        "mn-toy-held-out": Rule(
            "toy-regression", "held-out loss below 1e-3 of the variance in 9 of 10 runs", judge=_held_out
        ),
        "mn-mstep": compare("toy-regression", "toy", "loss", toy, _models("em-one-step", setting="separate"), True),
        "mn-ptb-baseline": compare("penn-treebank", "penn-treebank", "test_perplexity", ptb, fixed, True),
        "mn-ptb-reinforce": Rule(
            "penn-treebank", f"EM below REINFORCE, each of 4 configurations: {WELCH}", pairs, "penn-treebank"
        ),
        "mn-ptb-topk": Rule(
            "penn-treebank", f"EM below noisy top-k, 1 of 15 and of 5: {WELCH}", top_k, "penn-treebank"
        ),
        "mn-ptb-entropy": compare(
            "penn-treebank", "penn-treebank-h", "h_a", ptb[1:], [ptb[1] | {"method": "reinforce"}], True
        ),
        "mn-ptb-modules": compare(
            "penn-treebank", "penn-treebank-m", "context_information", ptb[1:], [{"method": "shuffled"}], False
        ),
        "mn-collapse": compare(
            "penn-treebank",
            "penn-treebank-h",
            "h_b",
            ptb[1:],
            [ptb[1] | {"method": m} for m in ("reinforce", "topk")],
            False,
        ),
        "mn-cifar-train": compare(
            "modular-cifar", "modular-cifar", "train", _models("linear"), _models("baseline"), False
        ),
        "mn-cifar-controller": compare(
            "modular-cifar", "modular-cifar", "gap", _models("convolution"), _models("linear"), True
        ),
        "mn-cifar-generalise": compare(
            "modular-cifar", "modular-cifar", "test", _models("baseline"), _models("linear"), False
        ),
    }


def _toy(runs: Runs) -> tuple[Verdict, str]:
    mine = runs.where(model="em", setting="separate")
    solved = sum(mine.values("solved"))
    if len(mine) < 10:
        return ("inconclusive" if mine else "not-run"), f"{solved} of {len(mine)}"
    return ("holds" if solved >= 0.9 * len(mine) else "contradicted"), f"{solved} of {len(mine)} solved"


def _held_out(runs: Runs) -> tuple[Verdict, str]:
    losses = runs.where(model="em", setting="separate").values("loss")
    solved = sum(loss < 1e-3 for loss in losses)
    if len(losses) < 10:
        return ("inconclusive" if losses else "not-run"), f"{solved} of {len(losses)}"
    return ("holds" if solved >= 0.9 * len(losses) else "contradicted"), f"{solved} of {len(losses)} below 1e-3"
