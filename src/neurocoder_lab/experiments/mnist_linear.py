"""MNIST with a linear classifier (Fig 4 of Neurocoder): the error against the number of attention steps, and a look at
the attention.

    neurocoder run mnist-linear --model neurocoder --attention-steps 5
    neurocoder tune mnist-linear
    neurocoder sweep mnist-linear --seeds 5
    neurocoder sweep mnist-linear --seeds 5 --optimiser sgd --model linear neurocoder --attention-steps 0 1 5 10

The Neurocoder has no more parameters than the linear classifier: layer and controller see a fixed random projection of
the image to 200 numbers. With one attention step it keeps its recurrent controller, so that only the steps change (and
the gates, which have nothing to mix yet). The learning rate, chosen on held-out data for each, falls linearly to zero;
so tune first. SGD, with small batches that take four times as long, is tuned for 1, 5 and 10 steps, and so is the
reading controller, which has no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab import data, figures
from neurocoder_lab.attention import look
from neurocoder_lab.classification import Classifier, ImageConfig, normalise
from neurocoder_lab.errors import LabError
from neurocoder_lab.results import Runs, deviation, spread
from neurocoder_lab.task import Experiment, Grid, Picture, Table
from neurocoder_lab.tuning import best

Model = Literal["linear", "neurocoder", "neurocoder-reading", "single-30-slots", "multi-10-slots"]
Optimiser = Literal["adam", "sgd"]
MODELS: tuple[Model, ...] = Model.__args__
OPTIMISERS: tuple[Optimiser, ...] = Optimiser.__args__
NAMES = {
    "linear": "linear classifier",
    "neurocoder": "Neurocoder",
    "neurocoder-reading": "Neurocoder, reading controller",
    "single-30-slots": "single-step, 30 slots",
    "multi-10-slots": "multi-step, 10 slots",
    "adam": "Adam",
    "sgd": "SGD",
}

PROJECTED = 200
PIXELS = (0.1307,), (0.3081,)  # mean and standard deviation
BATCH = {"adam": 128, "sgd": 32}
EPOCHS = {"smoke": 4, "desk": 10, "paper": 50}
EXAMPLES = {"smoke": 1000, "desk": 60_000, "paper": 60_000}
MOST_STEPS, FEW = 10, (1, 5, 10)
STEPS: dict[Model, tuple[int, ...]] = {  # attention steps that a model can have
    "linear": (0,),
    "neurocoder": tuple(range(1, MOST_STEPS + 1)),
    "neurocoder-reading": FEW,
    "single-30-slots": (1,),
    "multi-10-slots": (5,),
}
USUAL: dict[Model, int] = {"linear": 0, "single-30-slots": 1}  # others: 5
PAPER: dict[str, Any] = {"key_dim": 2, "sharpness": 5.0}  # 10 / K, as the authors'
SEVERAL: dict[str, Any] = {"least_used": 2, "rules": nc.Rules(gate="state")}  # gates of the state are smaller
LAYERS: dict[Model, dict[str, Any]] = {
    "neurocoder": {"slots": 5, "heads": 2, "controller": 7} | PAPER | SEVERAL,
    "neurocoder-reading": {
        "slots": 18, "heads": 4, "key_dim": 3, "least_used": 2, "controller": 12, "controller_sees": "read",
    },
    # Fig 4b to d: five components each
    "single-30-slots": {"slots": 30, "heads": 5} | PAPER,
    "multi-10-slots": {"slots": 10} | PAPER | SEVERAL,
}  # fmt: skip
# what is tried on held-out data
RATES = {"adam": (0.001, 0.003, 0.01, 0.03), "sgd": (0.01, 0.03, 0.1, 0.3)}
TRIED: tuple[tuple[Model, Optimiser, tuple[int, ...]], ...] = (
    ("linear", "adam", STEPS["linear"]),
    ("linear", "sgd", STEPS["linear"]),
    ("neurocoder", "adam", STEPS["neurocoder"]),
    ("neurocoder", "sgd", FEW),  # small batches take four times as long
    ("neurocoder-reading", "adam", STEPS["neurocoder-reading"]),
    ("single-30-slots", "adam", STEPS["single-30-slots"]),
    ("multi-10-slots", "adam", STEPS["multi-10-slots"]),
)
UNTUNED = {"adam": 0.003, "sgd": 0.1}
SEEN = {  # what is measured of the attention, by metric
    "patterns": "common patterns",
    "pattern_coverage": "share of images with one",
    "patterns_distinct": "distinct patterns",
    "patterns_effective": "exp(entropy) of patterns",
    "tree_separation": "tree",
    "tree_separation_untrained": "tree before training",
    "tree_separation_shuffled": "shuffled attention",
    "tree_purity": "purity of leaves",
}


@dataclass(frozen=True)
class MnistLinear(ImageConfig):
    """Digits told apart by one layer."""

    model: Model = "neurocoder"
    """linear: of all pixels; the others are Neurocoders of a fixed random projection."""
    attention_steps: int | None = None
    """J in the paper: 1 to 10, of neurocoder-reading 1, 5 or 10; by default as chosen on held-out data, else 5."""
    optimiser: Optimiser = "adam"
    """adam: batches of 128; sgd: batches of 32, as in the paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        can = STEPS[self.model]
        if self.attention_steps is not None and self.attention_steps not in can:
            wanted = f"{min(can)} to {max(can)}" if len(can) > len(FEW) else " or ".join(map(str, can))
            raise LabError(f"{self.model} has {wanted} attention steps, got {self.attention_steps}")


def fill(config: MnistLinear) -> dict[str, Any]:
    place = {"model": config.model, "optimiser": config.optimiser}
    steps = config.attention_steps
    if steps is None:
        steps = best("mnist-linear", "attention_steps", **place) or USUAL.get(config.model, 5)
    return {
        "epochs": EPOCHS[config.budget],
        "examples": EXAMPLES[config.budget],
        "rate": best("mnist-linear", "rate", **place, attention_steps=steps) or UNTUNED[config.optimiser],
        "attention_steps": steps,
    }


class Projection(nn.Module):
    """A fixed random linear map, the same in every run."""

    weight: Tensor

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        drawn = torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(0))
        self.register_buffer("weight", drawn / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def build(model: Model, attention_steps: int) -> nn.Sequential:
    if model == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    network = nn.Sequential(nn.Flatten(), Projection(784, PROJECTED), nn.Linear(PROJECTED, 10))
    nc.recode(network, "2", steps=attention_steps, **LAYERS[model])
    return network


class Digits(Classifier):
    """A classifier whose error is measured, and its attention where the paper shows it."""

    def __init__(self, config: MnistLinear):
        model = build(config.model, config.attention_steps)
        kind = {"adam": partial(torch.optim.Adam, fused=True), "sgd": torch.optim.SGD}[config.optimiser]
        super().__init__(
            model,
            kind(model.parameters(), lr=config.rate),
            data.images("mnist"),
            config,
            BATCH[config.optimiser],
            partial(normalise, mean=PIXELS[0], std=PIXELS[1]),
        )
        self.shown = config.model in ("single-30-slots", "multi-10-slots")
        self.untrained = self._look()["tree_separation"] if self.shown else None

    def evaluate(self) -> dict[str, float]:
        return {f"{self.measure}_error": 100 - super().evaluate()[self.measure]}

    @torch.no_grad()
    def _look(self) -> dict[str, Any]:
        with nc.trace(self.model) as seen:
            self.model(self.prepare(self.test[0]).to(next(self.model.parameters()).device))
        return look(seen["2"].left[:, :3].cpu(), self.test[1])

    def conclude(self) -> dict[str, Any]:
        return self._look() | {"tree_separation_untrained": self.untrained} if self.shown else {}


def tabulate(runs: Runs) -> list[Table]:
    """Error of every model, and what was seen of the attention."""
    header = ["model", "attention steps", "optimiser", "learning rate", "parameters", "test error, %"]
    rows = []
    for model in MODELS:
        for optimiser in OPTIMISERS:
            for steps in STEPS[model]:
                mine = runs.where(model=model, optimiser=optimiser, attention_steps=steps)
                if mine:
                    rate, size = f"{mine[0]['config']['rate']:g}", f"{mine[0]['final']['parameters']:,}"
                    error = spread(mine.values("test_error"))
                    rows.append([NAMES[model], str(steps or "-"), NAMES[optimiser], rate, size, error])
    tables = [("MNIST test error (Fig 4a; the paper prints a curve: up to 5 points below linear)", header, rows)]
    seen = [
        [NAMES[model], *(spread(mine.values(name), 3) for name in SEEN)]
        for model in ("single-30-slots", "multi-10-slots")
        if (mine := runs.where(model=model, optimiser="adam"))
    ]
    if seen:
        title = (
            "Attention to the first three components: patterns that at least 1% of the images hold; how much of what "
            "there is to know about the digit (entropy) a leaf of the binary tree tells"
        )
        tables.append((title, ["model", *SEEN.values()], seen))
    return tables


def draw(runs: Runs) -> list[Picture]:
    """Fig 4, a to d."""
    pictures = []
    parts = {}
    for optimiser in OPTIMISERS:
        ran, lines = runs.where(optimiser=optimiser), {}
        for model in ("linear", "neurocoder", "neurocoder-reading"):
            errors = {
                steps: ran.where(model=model, attention_steps=steps).values("test_error") for steps in STEPS[model]
            }
            errors = {steps: values for steps, values in errors.items() if values}
            if errors:
                means = [sum(values) / len(values) for values in errors.values()]
                line = [*errors], means, [deviation(values) for values in errors.values()]
                lines[NAMES[model]] = line if model != "linear" else _level(line)
        if any(len(steps) > 2 for steps, *_ in lines.values()):
            parts[f"test error, %, {NAMES[optimiser]}"] = lines
    if parts:
        title = "Fig 4a: MNIST test error against the number of attention steps, mean ± std over seeds"
        pictures.append((title, figures.panels(parts, over="attention steps J")))
    first = runs.where(optimiser="adam", seed=0)
    shown = {NAMES[m]: run["final"] for m in ("single-30-slots", "multi-10-slots") for run in first.where(model=m)}
    if shown:
        attention = {name: final["attention"] for name, final in shown.items()}
        title = "Fig 4b: mean attention over M_U to the first three components, for each digit (seed 0)"
        pictures.append((title, figures.attention_maps(attention, [f"digit {digit}" for digit in range(10)])))
    if NAMES["single-30-slots"] in shown:
        final = shown[NAMES["single-30-slots"]]
        centres = {f"component {n + 1}": pair for n, pair in enumerate(final["two_patterns"])}
        title = "Fig 4c: the two attention patterns of each of the first three components, single-step (seed 0)"
        pictures.append((title, figures.patterns(centres)))
        title = "Fig 4d: the tree that these patterns make, and where the images of each digit end up (seed 0)"
        pictures.append((title, figures.tree(final["leaves"])))
    return pictures


def _level(line: tuple[list[int], list[float], list[float]]) -> tuple[list[int], list[float], list[float]]:
    """A number that does not depend on the steps, over all of them."""
    _, means, stds = line
    return [1, MOST_STEPS], means * 2, stds * 2


def _tried(over: dict[str, tuple[Any, ...]], values: Callable[[dict], dict[str, tuple[Any, ...]]]) -> Grid:
    return Grid(over, values, {"measure": "validation"}, "validation_error", lower=True)


EXPERIMENT = Experiment(
    name="mnist-linear",
    config=MnistLinear,
    metrics=(
        "steps", "parameters", "test_error", "validation_error", *SEEN,
    ),
    axes={"model": MODELS, "attention_steps": tuple(range(MOST_STEPS + 1)), "optimiser": OPTIMISERS},
    fill=fill,
    start=Digits,
    figures=draw,
    tables=tabulate,
    grids=[
        *(  # the learning rate, for every number of attention steps by itself
            _tried(
                {"model": (model,), "optimiser": (optimiser,), "attention_steps": steps},
                lambda place: {"rate": RATES[place["optimiser"]]},
            )
            for model, optimiser, steps in TRIED
        ),
        *(
            _tried({"model": (model,), "optimiser": (optimiser,)}, lambda _, steps=steps: {"attention_steps": steps})
            for model, optimiser, steps in TRIED
            if len(steps) > 1
        ),
        _tried({"model": ("linear", "neurocoder")}, lambda place: {"optimiser": OPTIMISERS}),
    ],
    main={"optimiser": ("adam",)},
)  # fmt: skip
