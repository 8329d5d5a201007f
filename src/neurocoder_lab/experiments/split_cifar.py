"""Split CIFAR (Fig 8 of Neurocoder): five two-way tasks of CIFAR-10, twenty five-way tasks of CIFAR-100.

    neurocoder run split-cifar --dataset cifar100 --model neurocoder --method si
    neurocoder sweep split-cifar --seeds 5

A frozen backbone pretrained on ImageNet gives features, computed once; a 3-layer MLP on them learns task after task,
with an output layer for each (the task scenario). The paper's backbone was ResNet-18; here it is EfficientNet-Lite0,
whose weights come as a package, or ResNet-18 with `--backbone resnet18 --weights FILE`. Rate, sharpness, the weight of
the orthogonal loss (a, of 10 and 0.1) and the strength of SI are chosen on held-out data, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab import figures
from neurocoder_lab.continual import MultiHead, make
from neurocoder_lab.continual.training import METRICS, Learner, StreamConfig, check_form, orthogonal
from neurocoder_lab.errors import LabError
from neurocoder_lab.features import Backbone, features
from neurocoder_lab.networks import mlp
from neurocoder_lab.results import Runs, spread
from neurocoder_lab.task import Experiment, Grid, Picture, Table
from neurocoder_lab.tuning import best

Dataset = Literal["cifar10", "cifar100"]
Model = Literal["plain", "neurocoder", "neurocoder-a0.1"]
Form = Literal["neurocoder", "neurocoder-a0.1"]
Method = Literal["none", "si"]
DATASETS: tuple[Dataset, ...] = Dataset.__args__
MODELS: tuple[Model, ...] = Model.__args__
FORMS: tuple[Form, ...] = Form.__args__
METHODS: tuple[Method, ...] = Method.__args__
NAMES = {"plain": "plain head", "neurocoder": "Neurocoder, a = 10", "neurocoder-a0.1": "Neurocoder, a = 0.1"}
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}

TASKS = {
    "cifar10": [[*range(first, first + 2)] for first in range(0, 10, 2)],
    "cifar100": [[*range(first, first + 5)] for first in range(0, 100, 5)],
}
HIDDEN = 512, 256
BATCH = 128
EPOCHS = {"smoke": 3, "desk": 4, "paper": 4}
EXAMPLES = {"smoke": 1000, "desk": 50_000, "paper": 50_000}
LAYERS: dict[str, Any] = {"slots": 100, "heads": 10, "key_dim": 5}  # the paper's least_used = 5 needs several steps
ORTHOGONAL = {"plain": 0.0, "neurocoder": 10.0, "neurocoder-a0.1": 0.1}
# what is tried on held-out data, the same for every head
SHARPNESS = (1 / 5, 1.0, 3.0)
RATES = (0.00003, 0.0001, 0.0003, 0.001)
GRID = (100.0, 1000.0, 10_000.0, 100_000.0)


@dataclass(frozen=True)
class SplitCifar(StreamConfig):
    """Tasks of CIFAR classes, one after the other, on features of a frozen backbone."""

    dataset: Dataset = "cifar10"
    """cifar10: 5 tasks of 2 classes; cifar100: 20 tasks of 5."""
    model: Model = "neurocoder"
    """The 3-layer MLP on the features: plain, or every layer re-coded, with much or little orthogonal loss."""
    method: Method = "none"
    """Plain training with Adam, or with synaptic intelligence."""
    rate: float | None = None
    """Learning rate of Adam; by default as tuned on held-out training data, with EfficientNet-Lite0."""
    sharpness: float | None = None
    """Of the Neurocoder's attention, by default as chosen on held-out data; 0 for the plain head."""
    orthogonal: float | None = None
    """Weight of the orthogonal loss (a in the paper); 0 for the plain head."""
    backbone: Backbone = "efficientnet-lite0"
    """The frozen network; resnet18 needs weights."""
    weights: str = ""
    """For resnet18: a safetensors file with its weights, named as torchvision's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("rate")
        check_form(self, self.model, recoded=self.model != "plain")
        if self.method == "none" and self.penalty:
            raise LabError("without a method there is no penalty to choose a strength for")


def fill(config: SplitCifar) -> dict[str, Any]:
    place = {"dataset": config.dataset, "model": config.model}
    untuned = 1.0 if config.model in FORMS else 0.0  # 1: the paper's attention has no temperature
    return {
        "epochs": EPOCHS[config.budget],
        "examples": EXAMPLES[config.budget],
        "rate": best("split-cifar", "rate", **place),
        "sharpness": best("split-cifar", "sharpness", **place) or untuned,
        "orthogonal": ORTHOGONAL[config.model],
        "penalty": best("split-cifar", "penalty", **place) if config.method == "si" else 0.0,
    }


def build(dataset: Dataset, width: int, sharpness: float) -> MultiHead:
    """The head on features of this width; re-coded where there is a sharpness."""
    body = nn.Sequential(*mlp(width, *HIDDEN), nn.ReLU())
    network = MultiHead(body, [nn.Linear(HIDDEN[-1], len(classes)) for classes in TASKS[dataset]])
    if sharpness:
        nc.recode(network, "*", **LAYERS, sharpness=sharpness)
    return network


def start(config: SplitCifar) -> Learner:
    if config.rate is None or config.penalty is None:
        raise LabError("this is not tuned yet: neurocoder tune split-cifar")
    examples = features(config.dataset, config.backbone, config.weights)
    stream = config.stream(examples, TASKS[config.dataset], "task", Tensor.float)
    model = build(config.dataset, examples.train[0].shape[1], config.sharpness)
    optimiser = torch.optim.Adam(model.parameters(), lr=config.rate, fused=True)
    method = make("si", model, config.penalty) if config.method == "si" else make("adam", model)
    extra = orthogonal(model, config.orthogonal) if config.orthogonal else None
    learner = Learner(model, optimiser, stream, method, config.epochs, BATCH, extra)
    learner.fingerprint = examples.fingerprint
    return learner


def draw(runs: Runs) -> list[Picture]:
    """Fig 8 for both data sets."""
    pictures = []
    for dataset in DATASETS:
        curves = {}
        for method in METHODS:
            for model in MODELS:
                curve = runs.where(dataset=dataset, model=model, method=method).curve("accuracy")
                if curve is not None:
                    name = NAMES[model] + (", SI" if method == "si" else "")
                    curves[name] = ([*range(1, len(curve[0]) + 1)], *curve[1:])
        if curves:
            title = f"Fig 8, Split {TITLES[dataset]}: average accuracy over the tasks learned so far, mean ± std"
            pictures.append((title, figures.curves(curves, "accuracy, %", log=False, over="tasks learned")))
    return pictures


def tabulate(runs: Runs) -> list[Table]:
    tables = []
    for dataset in DATASETS:
        header = ["head", "method", "parameters", "final accuracy", "forgetting", "when learned"]
        rows = []
        for method in METHODS:
            for model in MODELS:
                mine = runs.where(dataset=dataset, model=model, method=method)
                if mine:
                    cells = [spread(mine.values(metric)) for metric in ("accuracy", "forgetting", "learned")]
                    size = f"{mine[0]['final']['parameters']:,}"
                    rows.append([NAMES[model], "SI" if method == "si" else "none", size, *cells])
        if rows:
            tables.append((f"Split {TITLES[dataset]} after the last task, %", header, rows))
    return tables


EXPERIMENT = Experiment(
    name="split-cifar",
    config=SplitCifar,
    metrics=METRICS,
    axes={"dataset": DATASETS, "model": MODELS, "method": METHODS},
    fill=fill,
    start=start,
    figures=draw,
    tables=tabulate,
    grids=[
        Grid(
            {"dataset": DATASETS, "model": FORMS},
            lambda place: {"sharpness": SHARPNESS},
            {"measure": "validation", "method": "none", "rate": 0.0003},
            "accuracy",
        ),
        Grid(
            {"dataset": DATASETS, "model": MODELS},
            lambda place: {"rate": RATES},
            {"measure": "validation", "method": "none"},
            "accuracy",
        ),
        Grid(  # the weight of the orthogonal loss by which the claims are judged
            {"dataset": DATASETS},
            lambda place: {"model": FORMS},
            {"measure": "validation", "method": "none"},
            "accuracy",
        ),
        Grid(
            {"dataset": DATASETS, "model": MODELS},
            lambda place: {"penalty": GRID},
            {"measure": "validation", "method": "si"},
            "accuracy",
        ),
    ],
)
