"""The toy regression of Modular Networks (Fig 3, section 3.1, appendix B): two modules, one chosen for each point.

    neurocoder run toy-regression --model em-1-step --setting overlapping
    neurocoder sweep toy-regression --seeds 10

Points of two Gaussians in the plane; those of one are rotated, those of the other scaled. The paper gives no means:
+-(3, 3) with a standard deviation of 0.7 keeps the two apart, +-(1, 1) lets them overlap. Losses are squared errors of
the most likely module over the variance of the targets. 1,000 training points, batches of 128, Adam at 0.01, a variance
of 0.05 in the likelihood; EM draws 10 samples. The modules have no bias, as the problem has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, log, log10, pi, sin
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import neurocoder as nc
from neurocoder.modular.route import Given, routed
from neurocoder.modular.training import entropies, gaussian
from neurocoder_lab import figures
from neurocoder_lab.modules import BETWEEN, Lesson, Method
from neurocoder_lab.results import Runs, spread
from neurocoder_lab.task import Config, Experiment, Picture, Table, Task

Model = Literal["em", "em-5-steps", "em-1-step", "reinforce", "topk"]
Setting = Literal["separate", "overlapping"]
MODELS: tuple[Model, ...] = Model.__args__
SETTINGS: tuple[Setting, ...] = Setting.__args__
NAMES = {
    "em": "EM",
    "em-5-steps": "EM, 5 steps between E-steps",
    "em-1-step": "EM, 1 step between E-steps",
    "reinforce": "REINFORCE",
    "topk": "noisy top-k",
    "separate": "clusters apart",
    "overlapping": "overlapping clusters",
}
HOW: dict[Model, tuple[Method, int]] = {  # the training, and gradient steps between its E-steps
    "em": ("em", BETWEEN),
    "em-5-steps": ("em", 5),
    "em-1-step": ("em", 1),
    "reinforce": ("reinforce", 0),
    "topk": ("topk", 0),
}
POINTS, HELD_OUT, BATCH, VARIANCE, RATE = 1000, 2000, 128, 0.05, 0.01
MEANS = {"separate": 3.0, "overlapping": 1.0}
ITERATIONS = {"smoke": 150, "desk": 7500, "paper": 7500}
LOSSES = {"train_loss": "training loss", "held_out_loss": "held-out loss"}
LEAST = 1e-8  # losses below it are drawn there


@dataclass(frozen=True)
class ToyRegression(Config):
    """Points of two clusters, each with a linear map of its own, by a layer that chooses one of two modules."""

    model: Model = "em"
    """How it is trained."""
    setting: Setting = "separate"
    """Whether the clusters can be told apart."""
    iterations: int | None = None
    """Gradient steps, the same for every model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("iterations")


def problem(mean: float) -> tuple[Tensor, Tensor]:
    """Inputs and targets (Eq. 17), training points first."""
    angle = 2 * pi * torch.rand(()).item()
    rotation = torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]])
    scaling = torch.randn(2)
    first = torch.rand(POINTS + HELD_OUT, 1) < 0.5
    x = torch.where(first, mean, -mean) + 0.7 * torch.randn(POINTS + HELD_OUT, 2)
    return x, torch.where(first, x @ rotation.t(), x * scaling)


class Toy(Task):
    def __init__(self, config: ToyRegression):
        self.x, self.y = problem(MEANS[config.setting])
        self.how = HOW[config.model]
        model = nn.Sequential(nc.modular.Linear(2, 2, bias=False, modules=2))
        optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
        super().__init__(model, optimiser, config.iterations, evaluate_every=max(config.iterations // 50, 1))

    def attach(self, accelerator: Accelerator) -> None:
        super().attach(accelerator)
        method, between = self.how
        self.lesson = Lesson(method, self.network, gaussian(VARIANCE), POINTS, between, mixed=2)

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.randint(POINTS, (BATCH,))
        x, y, index = self.share(self.x[index], self.y[index], index)
        return x, y, index

    def step(self, index: int) -> dict[str, Tensor]:
        loss = self.lesson.loss(index, self.batch, self.batch)
        self.learn(loss)
        return {"loss": loss}

    def evaluate(self) -> dict[str, float]:
        x, y = (tensor.to(self.accelerator.device) for tensor in (self.x, self.y))
        with nc.trace(self.model) as seen:
            error = (self.model(x) - y).square().mean(1) / y.var(0).mean()
        h_a, h_b = entropies(seen)
        train, held_out = error[:POINTS].mean().item(), error[POINTS:].mean().item()
        likelihood = log_likelihood(self.model, x[:POINTS], y[:POINTS])
        return {"train_loss": train, "held_out_loss": held_out, "h_a": h_a, "h_b": h_b, "log_likelihood": likelihood}

    def conclude(self) -> dict[str, Any]:
        return {"gradient_steps": self.steps}

    def state(self) -> dict[str, Tensor]:
        return self.lesson.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.lesson.load_state(state)


def log_likelihood(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The mean of log p(y | x), exactly: there are but two compositions to sum over (Eq. 4)."""
    joint = []
    for module in range(2):
        with routed(model, Given(torch.full((len(x), 1), module))) as route:
            score = gaussian(VARIANCE)(model(x), y)
        assert route.log_prob is not None
        joint.append(score + route.log_prob)
    return torch.stack(joint).logsumexp(0).mean().item()


def solved(final: dict[str, float]) -> bool:
    """As the claim has it: losses near zero, a certain choice, both modules in use."""
    return max(final["train_loss"], final["held_out_loss"]) < 1e-3 and final["h_a"] < 0.05 and final["h_b"] > 0.65


def tabulate(runs: Runs) -> list[Table]:
    metrics = LOSSES | {"h_a": "H_a", "h_b": f"H_b (ln 2 = {log(2):.3f})", "log_likelihood": "log-likelihood"}
    tables = []
    for setting in SETTINGS:
        rows = []
        for model in MODELS:
            mine = runs.where(model=model, setting=setting)
            if mine:
                count = f"{sum(solved(run['final']) for run in mine)} of {len(mine)}"
                rows.append([NAMES[model], count, *(spread(mine.values(metric), 3) for metric in metrics)])
        if rows:
            steps = runs.where(setting=setting)[0]["config"]["iterations"]
            title = f"Toy regression, {NAMES[setting]}, {steps:,} gradient steps each"
            tables.append((title, ["training", "solved", *metrics.values()], rows))
    return tables


def draw(runs: Runs) -> list[Picture]:
    """Fig 3: entropies, and losses, over training."""
    pictures, models = [], {NAMES[model]: {"model": model} for model in MODELS}
    for setting in SETTINGS:
        mine = Runs(run | {"curve": run["curve"] | _logarithms(run["curve"])} for run in runs.where(setting=setting))
        if mine.curves("h_a", models):
            title = f"Fig 3a, {NAMES[setting]}: module selection entropies on all points, mean ± std over seeds"
            labels = {"h_a": "H_a, nats (certain: 0)", "h_b": f"H_b, nats (both used: {log(2):.2f})"}
            parts = {label: mine.curves(metric, models) for metric, label in labels.items()}
            pictures.append((title, figures.panels(parts, skip=1)))
            title = f"Fig 3b, {NAMES[setting]}: squared error over the targets' variance, its logarithm over seeds"
            parts = {f"log10 of {name}": mine.curves(f"log_{loss}", models) for loss, name in LOSSES.items()}
            pictures.append((title, figures.panels(parts, skip=1)))
    return pictures


def _logarithms(curve: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of the losses, whose seeds differ by orders of magnitude."""
    known = [loss for loss in LOSSES if loss in curve]
    return {f"log_{loss}": [log10(max(value, LEAST)) for value in curve[loss]] for loss in known}


EXPERIMENT = Experiment(
    name="toy-regression",
    config=ToyRegression,
    metrics=(
        "steps", "parameters", "loss", "train_loss", "held_out_loss", "h_a", "h_b", "log_likelihood", "gradient_steps",
    ),
    axes={"model": MODELS, "setting": SETTINGS},
    fill=lambda config: {"iterations": ITERATIONS[config.budget]},
    start=Toy,
    figures=draw,
    tables=tabulate,
)  # fmt: skip
