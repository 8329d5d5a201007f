"""Polynomial auto-regression (Figs 5, 6 of Neurocoder): a GRU whose head is plain or conditional.

    neurocoder run polynomial --model neurocoder-multi --setting noise
    neurocoder sweep polynomial --seeds 3

A sequence is cut into chunks, each from a random polynomial; from (x_t, y_{t-1}) the network predicts y_t. The papers
do not say how y is scaled, nor how many sequences there are; docs/log.md has what was tried.

Shapes: N sequences, T points, C chunks, D degrees, R components, P slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder_lab import figures
from neurocoder_lab.networks import Recurrent
from neurocoder_lab.results import Runs, spread
from neurocoder_lab.task import Config, Experiment, Grid, Picture, Table, Task
from neurocoder_lab.tuning import best

Model = Literal[
    "linear",
    "hypernet",
    "film",
    "neurocoder-single",
    "neurocoder-multi",
    "neurocoder-multi-no-usage",
    "neurocoder-multi-sharp",
]
Setting = Literal["plain", "noise", "double"]
MODELS: tuple[Model, ...] = Model.__args__
SETTINGS: tuple[Setting, ...] = Setting.__args__

POINTS, CHUNKS, BATCH, LARGEST_DEGREE = 40, 4, 128, 10
VALIDATION, TEST = 1024, 2048
NOISE = 0.3  # variance of the noise, as a share of the largest |y| of a sequence
ORTHOGONAL = 0.1
ITERATIONS = {"smoke": 200, "desk": 3000, "paper": 10_000}
HIDDEN = {"linear": 32, "hypernet": 28, "film": 32, "neurocoder-single": 16, "neurocoder-multi": 8}
HEADS: dict[str, dict[str, Any]] = {
    "hypernet": {"layer": nc.peers.HyperLinear},
    "film": {"layer": nc.peers.FiLM},
    "neurocoder-single": {"slots": 10, "heads": 15, "key_dim": 3},
    "neurocoder-multi": {"slots": 20, "steps": 5, "key_dim": 3, "least_used": 2},
    "neurocoder-multi-no-usage": {"slots": 20, "steps": 5, "key_dim": 3},
    "neurocoder-multi-sharp": {"slots": 20, "steps": 5, "key_dim": 3, "least_used": 2, "sharpness": 10 / 3},
}
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)  # tried on held-out data, the same for every model
UNTUNED = {  # what one seed chose before
    "linear": 0.03,
    "neurocoder-multi": 0.03,
    "neurocoder-multi-no-usage": 0.03,
    "neurocoder-multi-sharp": 0.03,
}
NAMES = {
    "linear": "GRU alone",
    "hypernet": "HyperNet",
    "film": "FiLM",
    "neurocoder-single": "Neurocoder, single-step",
    "neurocoder-multi": "Neurocoder, multi-step",
    "neurocoder-multi-no-usage": "multi-step without usage",
    "neurocoder-multi-sharp": "multi-step, authors' sharpness",
}


@dataclass(frozen=True)
class Polynomial(Config):
    """Polynomial auto-regression by a GRU with one of seven heads."""

    model: Model = "neurocoder-multi"
    """The head of the GRU; hidden sizes are the paper's, so that parameters are about equal."""
    setting: Setting = "plain"
    """plain: 4 polynomials a sequence; noise: Gaussian noise on y; double: 8 polynomials."""
    iterations: int | None = None
    """Training steps, of 128 fresh sequences each."""
    rate: float | None = None
    """Learning rate of Adam; by default the one tuned for the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("iterations")
        self.check_positive("rate")


def sequences(count: int, chunks: int, noise: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Inputs (x_t, y_{t-1}), (N, T, 2), and targets y_t, (N, T), each chunk scaled to a largest |y| of 1."""
    x_T = torch.linspace(-5, 5, POINTS)
    degree_NC = torch.randint(2, LARGEST_DEGREE + 1, (count, chunks, 1), generator=generator)
    powers_D = torch.arange(LARGEST_DEGREE + 1)
    coefficient_NCD = 2 * torch.rand(count, chunks, LARGEST_DEGREE + 1, generator=generator) - 1
    coefficient_NCD = coefficient_NCD * (powers_D <= degree_NC)
    basis_CTD = (x_T[:, None].double() ** powers_D).view(chunks, POINTS // chunks, -1)
    y_NCT = torch.einsum("ncd,ctd->nct", coefficient_NCD.double(), basis_CTD)
    y_NT = (y_NCT / y_NCT.abs().amax(-1, keepdim=True)).flatten(1).float()
    if noise:
        y_NT = y_NT + noise**0.5 * torch.randn(count, POINTS, generator=generator)
    before_NT = F.pad(y_NT, (1, 0))[:, :-1]
    return torch.stack((x_T.expand(count, -1), before_NT), -1), y_NT


def build(model: Model) -> nn.Module:
    network = Recurrent(2, HIDDEN.get(model, HIDDEN["neurocoder-multi"]))
    if model in HEADS:
        nc.recode(network, "head", **HEADS[model])
    return network


class Regression(Task):
    def __init__(self, config: Polynomial):
        model = build(config.model)
        optimiser = torch.optim.Adam(model.parameters(), lr=config.rate)
        super().__init__(model, optimiser, config.iterations, evaluate_every=max(config.iterations // 50, 1))
        self.chunks = CHUNKS * (2 if config.setting == "double" else 1)
        self.noise = NOISE if config.setting == "noise" else 0.0
        held_out = torch.Generator().manual_seed(1_000_003)  # the same for every model and seed
        self.validation = sequences(VALIDATION, self.chunks, self.noise, held_out)
        self.test = sequences(TEST, self.chunks, self.noise, held_out)
        self.orthogonal = ORTHOGONAL if config.model.startswith("neurocoder") else 0.0

    def step(self, index: int) -> dict[str, Tensor]:
        x, y = self.share(*sequences(BATCH, self.chunks, self.noise))
        loss = F.mse_loss(self.network(x).squeeze(-1), y)
        self.learn(loss + self.orthogonal * nc.orthogonality(self.model) if self.orthogonal else loss)
        return {"loss": loss}

    def error(self, data: tuple[Tensor, Tensor]) -> float:
        x, y = (tensor.to(self.accelerator.device) for tensor in data)
        return F.mse_loss(self.model(x).squeeze(-1), y).item()

    def evaluate(self) -> dict[str, float]:
        return {"validation": self.error(self.validation)}

    def conclude(self) -> dict[str, Any]:
        x, y = self.test
        ending: dict[str, Any] = {"test": self.error(self.test), "target_variance": y.var().item()}
        if isinstance(self.model.head, nc.Linear):
            ending |= attention_changes(self.model, x.to(self.accelerator.device), self.chunks)
        return ending


def attention_changes(model: nn.Module, x: Tensor, chunks: int) -> dict[str, Any]:
    """How much more the attention to the first component changes at chunk boundaries than inside of chunks (Fig 5).

    Change is the L1 distance of the normalised attention over M_U from one point to the next.
    """
    with nc.trace(model) as seen:
        prediction = model(x).squeeze(-1)
    attention_NTP = seen["head"].left[:, :, 0]
    attention_NTP = attention_NTP / attention_NTP.sum(-1, keepdim=True)
    change_NT = (attention_NTP[:, 1:] - attention_NTP[:, :-1]).abs().sum(-1)
    boundary_T = torch.arange(1, POINTS, device=x.device) % (POINTS // chunks) == 0
    at, inside = change_NT[:, boundary_T].mean().item(), change_NT[:, ~boundary_T].mean().item()
    example = {
        "attention": [[round(value, 3) for value in row] for row in attention_NTP[0].tolist()],
        "prediction": [round(value, 4) for value in prediction[0].tolist()],
        "y": [round(value, 4) for value in x[0, 1:, 1].tolist()],
        "chunks": chunks,
    }
    return {
        "change_at_boundaries": at,
        "change_inside": inside,
        "boundary_ratio": at / max(inside, 1e-12),
        "example": example,
    }


def draw(runs: Runs) -> list[Picture]:
    """Fig 6 for every setting, Fig 5 for single- and multi-step."""
    pictures = []
    for setting in SETTINGS:
        curves = {NAMES[model]: runs.where(setting=setting, model=model).curve("validation") for model in MODELS}
        curves = {name: curve for name, curve in curves.items() if curve is not None}
        if curves:
            pictures.append((f"Fig 6, {setting}: validation MSE, mean ± std over seeds", figures.curves(curves, "MSE")))
    for model in ("neurocoder-multi", "neurocoder-single"):
        for run in runs.where(setting="plain", model=model)[:1]:
            title = f"Fig 5, {NAMES[model]}: attention over M_U for the first component, and the prediction"
            pictures.append((title, figures.attention(run["final"]["example"])))
    return pictures


def tabulate(runs: Runs) -> list[Table]:
    header = [
        "head",
        "parameters",
        *(f"test MSE, {setting}" for setting in SETTINGS),
        "attention change, boundary / inside",
    ]
    rows = []
    for model in MODELS:
        mine = runs.where(model=model)
        if mine:
            errors = [spread(mine.where(setting=setting).values("test")) for setting in SETTINGS]
            ratio = spread(mine.where(setting="plain").values("boundary_ratio"), 3)
            rows.append([NAMES[model], f"{mine[0]['final']['parameters']:,}", *errors, ratio])
    return [("Polynomial auto-regression (the paper prints curves, no numbers)", header, rows)]


EXPERIMENT = Experiment(
    name="polynomial",
    config=Polynomial,
    metrics=("steps", "parameters", "validation", "test", "target_variance", "boundary_ratio"),
    axes={"model": MODELS, "setting": SETTINGS},
    fill=lambda config: {
        "iterations": ITERATIONS[config.budget],
        "rate": best("polynomial", "rate", model=config.model) or UNTUNED.get(config.model, 0.01),
    },
    start=Regression,
    figures=draw,
    tables=tabulate,
    grids=[
        Grid(
            {"model": MODELS},
            lambda place: {"rate": RATES},
            {"setting": "plain", "iterations": 1500},
            "validation",
            lower=True,
            last=5,
        )
    ],
)
