"""How the claims of the Modular Networks paper are judged."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import log
from statistics import mean
from typing import Any

from neurocoder_lab.evidence import Bound, Compare, Condition, Group, NineOfTen, welch
from neurocoder_lab.modules import ENOUGH
from neurocoder_lab.rules.rule import LEVEL, Rule, every, groups

LEARNED = 20.0  # percent of test images, twice what chance gives


def rules() -> dict[str, Rule]:
    return _treebank() | _toy() | _cifar()


def _treebank() -> dict[str, Rule]:
    def group(metric: str, method: str, modules: int, choices: int = 1, lower: bool = False) -> Group:
        return Group({"method": method, "modules": modules, "choices": choices}, metric, lower=lower)

    def perplexity(*row: Any) -> Group:
        return group("test_perplexity", *row, lower=True)

    one, three = perplexity("fixed", 1), perplexity("fixed", 3, 3)
    level = Condition(
        "the one-module baseline within 1.1 times the paper's 247",
        [one],
        lambda values: mean(values[0]) <= 1.1 * 247.408,
        lambda values: f"one-module baseline {mean(values[0]):.4g}",
    )
    chosen = [perplexity("em", modules) for modules in (5, 15)]
    reinforced = [
        Compare(perplexity("em", modules, choices), perplexity("reinforce", modules, choices))
        for modules in (5, 15)
        for choices in (1, 3)
    ]
    noisy = [Compare(mine, perplexity("topk", modules)) for mine, modules in zip(chosen, (5, 15), strict=True)]
    sure = group("h_a", "em", 15, lower=True)
    used, used_r, used_k = (group("h_b", method, 15) for method in ("em", "reinforce", "topk"))
    context, shuffled, untrained = (
        group(f"context_information{ending}", "em", 15) for ending in ("", "_shuffled", "_untrained")
    )
    reached = Condition(
        f"E-steps that reach every segment {ENOUGH} times: at 50,000 iterations they are sixteen",
        [group("e_steps", "em", 15)],
        lambda values: mean(values[0]) >= ENOUGH,
        lambda values: f"E-steps reach a segment {mean(values[0]):.2g} times",
    )

    def less_noise(metric: str) -> Condition:
        moves = _moves(metric)
        sides = [
            Group({"method": name, "modules": 15, "choices": 1}, metric, moves, True) for name in ("em", "reinforce")
        ]
        return Condition(
            f"{metric} moves no more between evaluations, in the second half of training, than that of REINFORCE, "
            "unless that has collapsed (H_b below 0.1 ln 15)",
            [*sides, used_r],
            lambda values: mean(values[0]) <= mean(values[1]) or mean(values[2]) < 0.1 * log(15),
            lambda values: f"{metric} moves {mean(values[0]):.2g} against {mean(values[1]):.2g}",
        )

    treebank = {
        "mn-ptb-baseline": every(chosen, [one, three]),
        "mn-ptb-reinforce": tuple(reinforced),
        "mn-ptb-topk": tuple(noisy),
        "mn-ptb-modules": (Compare(context, shuffled), Compare(context, untrained)),
        "mn-collapse": every([used], [used_r, used_k]),
    }
    by_claim = {name: Rule("penn-treebank", tests, enough=(level, reached)) for name, tests in treebank.items()}
    by_claim["mn-ptb-entropy"] = Rule(
        "penn-treebank",
        (Bound(sure, 0.2 * log(15)), Bound(used, 0.5 * log(15))),
        (less_noise("h_a"), less_noise("h_b")),
        enough=(level, reached),
        note="1 of 15 modules; the bounds are 0.2 ln 15 and 0.5 ln 15",
    )
    return by_claim


def _moves(metric: str) -> Callable[[dict[str, Any]], float]:
    """How far a number moves from one evaluation to the next in the second half of training, on average."""

    def moves(run: dict[str, Any]) -> float:
        steps, values = run["curve"]["step"], run["curve"][metric]
        late = [value for step, value in zip(steps, values, strict=True) if 2 * step >= steps[-1]]
        return mean(abs(after - before) for before, after in pairwise(late)) if len(late) > 1 else 0.0

    moves.__name__ = f"{metric}_moves"
    return moves


def _toy() -> dict[str, Rule]:
    em = {"model": "em", "setting": "separate"}
    loss, h_a, h_b, held_out = (
        Group(em, metric, lower=metric != "h_b") for metric in ("train_loss", "h_a", "h_b", "held_out_loss")
    )
    solved = NineOfTen(
        "training loss below 1e-3 of the targets' variance, H_a < 0.05, H_b > 0.65",
        [loss, h_a, h_b],
        lambda loss, h_a, h_b: loss < 1e-3 and h_a < 0.05 and h_b > 0.65,
    )
    general = NineOfTen("held-out loss below 1e-3 of the targets' variance", [held_out], lambda loss: loss < 1e-3)
    short = {"model": "em-1-step", "setting": "separate"}
    equal = Condition(
        "equal gradient steps",
        [Group(em, "gradient_steps"), Group(short, "gradient_steps")],
        lambda values: len({*values[0], *values[1]}) == 1,
        sure=True,
    )
    return {
        "mn-toy": Rule("toy-regression", (solved,), fewest=10),
        "mn-toy-held-out": Rule("toy-regression", (general,), fewest=10),
        "mn-mstep": Rule(
            "toy-regression",
            tuple(Compare(Group(em, metric), Group(short, metric)) for metric in ("h_b", "log_likelihood")),
            (equal,),
            note="15 gradient steps between E-steps against 1; the CIFAR-10 network's are in its own table",
        ),
    }


def _cifar() -> dict[str, Rule]:
    (train,), (train_b,) = groups("train", "linear"), groups("train", "baseline")
    (modular,), (baseline,) = groups("test", "linear"), groups("test", "baseline")
    higher = Condition(
        "train of linear is above baseline (5%, not corrected)",
        [train, train_b],
        lambda values: welch(*values)[0] < LEVEL,
        lambda values: f"train {mean(values[0]):.4g} against {mean(values[1]):.4g}",
    )

    def learned(model: str) -> Condition:
        return Condition(
            f"{model} tells {LEARNED:g}% of the test images right, twice what chance does",
            groups("test", model),
            lambda values: mean(values[0]) >= LEARNED,
            lambda values: f"test of {model} {mean(values[0]):.4g}",
        )

    return {
        "mn-cifar-train": Rule("modular-cifar", (Compare(train, train_b),)),
        "mn-cifar-controller": Rule(
            "modular-cifar",
            every(groups("gap", "convolution", lower=True), groups("gap", "linear", lower=True)),
            (learned("convolution"),),
        ),
        "mn-cifar-generalise": Rule(
            "modular-cifar",
            (Compare(baseline, modular, margin=-1.0),),
            given=(higher, learned("linear")),
            fewest=5,
            note="The test is that the upper 95% bound of modular - baseline is below 1 point",
        ),
    }
