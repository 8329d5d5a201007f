"""How every claim of both papers is judged: which experiment decides it, and by which rule.

A comparison is a one-sided Welch test at 5%, with Holm's correction over all comparisons of its table, and at least
three runs on either side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from scipy.stats import ttest_1samp, ttest_ind

from neurocoder_lab.parameters import TOLERANCE
from neurocoder_lab.results import Runs, spread

Verdict = Literal["holds", "contradicted", "inconclusive", "budget-too-short", "not-run"]
LEVEL, FEWEST = 0.05, 3


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


def welch(larger: list[float], smaller: list[float]) -> float:
    """p-value of a one-sided Welch test that the first mean is the larger."""
    _, p = ttest_ind(larger, smaller, equal_var=False, alternative="greater")
    return float(p)


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
    inside = sum(abs(value) <= TOLERANCE for value in away.values())
    ours = f"{inside} of {len(away)} within 5%; {worst} {away[worst]:+.1%}"
    return ("holds" if inside == len(away) else "contradicted"), ours


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
                "split-cifar", "split-cifar", "accuracy", _models("neurocoder", **fixed),
                _models("plain", **fixed), False,
            )  # fmt: skip
    alone = _models("neurocoder", dataset="cifar100", method="none")
    both = [*_models("plain", dataset="cifar100", method="none"), *_models("plain", dataset="cifar100", method="si")]
    found["nc-split-cifar100"] = compare("split-cifar", "split-cifar", "accuracy", alone, both, False)
    stressed, little = (_models(name, dataset="cifar10", method="none") for name in ("neurocoder", "neurocoder-a0.1"))
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
    return _nine_of_ten(runs.where(model="em", setting="separate").values("solved"), "solved")


def _held_out(runs: Runs) -> tuple[Verdict, str]:
    losses = runs.where(model="em", setting="separate").values("loss")
    return _nine_of_ten([loss < 1e-3 for loss in losses], "below 1e-3")


def _nine_of_ten(good: list[Any], what: str) -> tuple[Verdict, str]:
    ours = f"{sum(good)} of {len(good)} {what}"
    if len(good) < 10:
        return ("inconclusive" if good else "not-run"), ours
    return ("holds" if sum(good) >= 0.9 * len(good) else "contradicted"), ours
