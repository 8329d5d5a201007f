"""Large memories of which each head reads a few slots (ours): what is kept, and what can be learned at all.

    neurocoder run large-memory --scenario domain
    neurocoder tune large-memory
    neurocoder sweep large-memory --seeds 10

Split MNIST, and Split CIFAR on features of a frozen backbone. Two hidden layers of 256 units are re-coded, each head
reads its best slots of a large memory by addresses that are fixed at random, and rows that are not read do not move.
Every variant changes one thing; `joint` learns all ten classes at once, which is the other side of the trade.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab import data, figures
from neurocoder_lab.continual import MultiHead, make
from neurocoder_lab.continual.digits import BATCH, BENCHMARK, EPOCHS, EXAMPLES, prepare
from neurocoder_lab.continual.digits import TASKS as DIGITS
from neurocoder_lab.continual.methods import TITLES
from neurocoder_lab.continual.optimisers import adam
from neurocoder_lab.continual.training import METRICS, Learner, StreamConfig
from neurocoder_lab.errors import LabError
from neurocoder_lab.features import features
from neurocoder_lab.networks import Peer, mlp
from neurocoder_lab.results import Runs, deviation, spread
from neurocoder_lab.task import Experiment, Grid, Picture, Table
from neurocoder_lab.tuning import best

Dataset = Literal["mnist", "cifar10"]
MethodName = Literal["adam", "oewc", "si"]
Scenario = Literal["task", "domain", "class", "joint"]
Variant = Literal[
    "sparse",
    "slots-256",
    "slots-4096",
    "top-2",
    "top-4",
    "learned",
    "ordinary",
    "heads-16",
    "heads-32",
    "heads-64",
    "many-reads",
    "soft-reads",
    "residual",
    "shared-first",
    "mlp",
    "moe",
    "peer",
]
DATASETS: tuple[Dataset, ...] = Dataset.__args__
METHODS: tuple[MethodName, ...] = MethodName.__args__
SCENARIOS: tuple[Scenario, ...] = Scenario.__args__
VARIANTS: tuple[Variant, ...] = Variant.__args__
CENTRE: dict[str, Any] = {
    "slots": 1024, "heads": 8, "top_k": 1, "one_choice": True, "addresses": "fixed", "sparse": True,
}  # fmt: skip
CHANGES: dict[Variant, dict[str, Any]] = {
    "sparse": {},
    "slots-256": {"slots": 256},
    "slots-4096": {"slots": 4096},
    "top-2": {"top_k": 2},
    "top-4": {"top_k": 4},
    "learned": {"addresses": "learned"},
    "ordinary": {"sparse": False},
    "heads-16": {"heads": 16},
    "heads-32": {"heads": 32},
    "heads-64": {"heads": 64},
    "many-reads": {"slots": 256, "heads": 16, "top_k": 8},
    "soft-reads": {"slots": 256, "heads": 16, "top_k": 8, "sharpness": 1.0},
    "residual": {"residual": True},
    "shared-first": {},
}
NAMES = {
    "sparse": "1,024 slots, 8 heads, the best slot each, addresses fixed, only rows that were read move",
    "slots-256": "256 slots",
    "slots-4096": "4,096 slots",
    "top-2": "the best 2 slots a head",
    "top-4": "the best 4 slots a head",
    "learned": "addresses learned",
    "ordinary": "ordinary Adam: rows that were not read move, too",
    "heads-16": "16 heads",
    "heads-32": "32 heads",
    "heads-64": "64 heads",
    "many-reads": "256 slots, 16 heads, the best 8 slots each",
    "soft-reads": "the same, sharpness 1",
    "residual": "with a residual program, which all inputs share",
    "shared-first": "the first hidden layer plain",
    "mlp": "plain MLP of as many parameters",
    "moe": "mixture of experts, 1 a row, of as many parameters",
    "peer": "PEER: one layer of rank-one experts, product keys, 8 heads, the best each, of as many parameters",
}
HIDDEN = 256
CIFAR = [[*range(first, first + 2)] for first in range(0, 10, 2)]
RATE = 0.001
PENALTIES = {"oewc": (10.0, 100.0, 1000.0, 10_000.0), "si": (30.0, 300.0, 3000.0, 30_000.0)}
LOOKED_AT = 1000  # images of each task, to see which slots they read


@dataclass(frozen=True)
class LargeMemory(StreamConfig):
    """Split MNIST or Split CIFAR-10 with large memories, each head of which reads a few slots."""

    variant: Variant = "sparse"
    """What is changed: see neurocoder report."""
    method: MethodName = "adam"
    """Plain training with Adam, or with online EWC or SI on top."""
    scenario: Scenario = "domain"
    """task, domain, class: as in Split MNIST; joint: all ten classes at once, trained as long as the tasks together."""
    dataset: Dataset = "mnist"
    """mnist: digits; cifar10: features of a frozen backbone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "adam" and self.penalty:
            raise LabError(f"adam has no penalty: --method {' '.join(METHODS[1:])} have")
        if self.method != "adam" and self.scenario == "joint":
            raise LabError("nothing is forgotten where all classes are learned at once: --method adam")


def fill(config: LargeMemory) -> dict[str, Any]:
    penalty: float | None = 0.0
    if config.method != "adam":
        place = {"dataset": config.dataset, "scenario": config.scenario, "method": config.method}
        benchmark = BENCHMARK.get(config.scenario, {}).get(config.method)
        penalty = best("large-memory", "penalty", variant=config.variant, **place) or benchmark
    return {"epochs": EPOCHS[config.budget], "examples": EXAMPLES[config.budget], "penalty": penalty}


def build(variant: Variant, scenario: Scenario, width: int) -> nn.Module:
    """The network on inputs of this width. Plain layers and experts get as many parameters as `sparse` has."""
    if variant == "peer":
        experts = round((_parameters(width) / (2 * width)) ** 0.5) ** 2
        return _with_outputs(scenario, nn.Sequential(Peer(width, experts, heads=8, reads=1, key_dim=5)), width)
    wide = _matched(width) if variant == "mlp" else HIDDEN
    model = _with_outputs(scenario, nn.Sequential(*mlp(width, wide, wide, bias=False), nn.ReLU()), wide)
    hidden = ["body.0", "body.2"] if scenario == "task" else ["0", "2"]
    if variant == "moe":
        experts = round(_parameters(width) / (HIDDEN * (width + HIDDEN)))
        nc.recode(model, hidden, nc.peers.MixtureOfExperts, experts=experts, top_k=1)
    elif variant != "mlp":
        nc.recode(model, hidden[variant == "shared-first" :], **CENTRE | CHANGES[variant])
    return model


def _with_outputs(scenario: Scenario, body: nn.Sequential, width: int) -> nn.Module:
    if scenario == "task":
        return MultiHead(body, [nn.Linear(width, 2) for _ in range(5)])
    return nn.Sequential(*body, nn.Linear(width, 2 if scenario == "domain" else 10))


def _parameters(width: int) -> int:
    """Of the hidden layers of `sparse`."""
    return CENTRE["slots"] * (width + 3 * HIDDEN + 2)


def _matched(width: int) -> int:
    """Hidden units with which the plain network has as many parameters in its hidden layers."""
    return round(((width**2 + 4 * _parameters(width)) ** 0.5 - width) / 2)


class Reader(Learner):
    """A learner that looks at which slots each task reads, and how far later tasks move them."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.left: dict[str, Tensor] = {}  # left programs of the first re-coded layer when a task had been learned

    def _first(self) -> tuple[str, nc.Linear] | None:
        found = [(name, layer) for name, layer in self.model.named_modules() if isinstance(layer, nc.Linear)]
        return found[0] if found else None

    @torch.no_grad()
    def _reads(self, task: int, name: str) -> Tensor:
        """How often each slot of that layer is read for images of a task: shares that sum to 1."""
        x = self.stream.test[task][0][:LOOKED_AT].to(self.accelerator.device)
        with nc.trace(self.model) as seen:
            self.stream.logits(self.model, x, task)
        return seen[name].use()["left"].mean(0).cpu()

    def _finish(self, task: int) -> None:
        super()._finish(task)
        if (first := self._first()) is not None:
            self.left[str(task)] = first[1].memory.left.detach().cpu().clone()

    def conclude(self) -> dict[str, Any]:
        ending, first = super().conclude(), self._first()
        if first is None or not self.left:
            return ending
        name, layer = first
        reads = torch.stack([self._reads(task, name) for task in range(len(self.stream))])
        now, overwritten = layer.memory.left.detach().cpu(), []
        for task, then in self.left.items():
            moved_P = (now - then).norm(dim=1) / then.norm(dim=1).clamp_min(1e-12)
            overwritten.append(round((reads[int(task)] * moved_P).sum().item(), 4))
        common = torch.minimum(reads[:, None], reads[None]).sum(-1)
        shared = [[round(share, 4) for share in row] for row in common.tolist()]
        return ending | {"shared_reads": shared, "overwritten": overwritten}

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"left.{task}": tensor for task, tensor in self.left.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.left = {name.removeprefix("left."): t for name, t in state.items() if name.startswith("left.")}


def start(config: LargeMemory) -> Reader:
    if config.penalty is None:
        raise LabError("this is not tuned yet: neurocoder tune large-memory --settings penalty")
    digits = config.dataset == "mnist"
    examples = data.images("mnist") if digits else features(config.dataset)
    tasks = DIGITS if digits else CIFAR
    joint = config.scenario == "joint"
    stream = config.stream(
        examples,
        [[*range(10)]] if joint else tasks,
        "class" if joint else config.scenario,
        prepare if digits else Tensor.float,
    )
    model = build(config.variant, config.scenario, stream.train[0][0].shape[1])
    method = make(config.method, model, config.penalty if config.method != "adam" else None)
    learner = Reader(model, adam(model, RATE), stream, method, config.epochs, BATCH)
    learner.fingerprint = examples.fingerprint
    return learner


def tabulate(runs: Runs) -> list[Table]:
    """Accuracy of every variant in every scenario, one table a data set."""
    tables = []
    for dataset in DATASETS:
        here = runs.where(dataset=dataset)
        places = product(SCENARIOS, METHODS)
        columns = [(s, m) for s, m in places if here.where(scenario=s, method=m)]
        header = ["variant", "parameters", *(f"{s}, {TITLES[m]}" for s, m in columns)]
        rows = []
        for variant in VARIANTS:
            if mine := here.where(variant=variant):
                cells = [spread(mine.where(scenario=s, method=m).values("accuracy")) for s, m in columns]
                rows.append([NAMES[variant], f"{mine[0]['final']['parameters']:,}", *cells])
        if rows:
            tables.append((f"Large memories, {dataset}: accuracy after the last task, %", header, rows))
    return tables


def draw(runs: Runs) -> list[Picture]:
    """What is kept against what can be learned at all; which slots the tasks share, and how far they were moved."""
    pictures = []
    digits = runs.where(dataset="mnist", method="adam")
    points = {}
    for variant in VARIANTS:
        both = [digits.where(variant=variant, scenario=s).values("accuracy") for s in ("joint", "domain")]
        if all(both):
            points[variant] = tuple((mean(values), deviation(values)) for values in both)
    if points:
        title = "Split MNIST, Adam alone: what is kept against what can be learned at all"
        words = "all ten digits at once: accuracy, %", "domain scenario, after the last task: accuracy, %"
        pictures.append((title, figures.trade(points, *words)))
    shared = [
        run["final"] for run in digits.where(variant="sparse", scenario="domain") if "shared_reads" in run["final"]
    ]
    if shared:
        tables = torch.tensor([one["shared_reads"] for one in shared]).mean(0).tolist()
        moved = torch.tensor([one["overwritten"] for one in shared]).mean(0).tolist()
        title = "Split MNIST, domain scenario: reads that two tasks have in common, and how far later tasks moved them"
        pictures.append((title, figures.shared(tables, moved)))
    return pictures


CANDIDATES = tuple(variant for variant in VARIANTS if variant in CHANGES)
EXPERIMENT = Experiment(
    name="large-memory",
    config=LargeMemory,
    metrics=METRICS,
    axes={"variant": VARIANTS, "method": METHODS, "scenario": SCENARIOS, "dataset": DATASETS},
    fill=fill,
    start=start,
    figures=draw,
    tables=tabulate,
    grids=[
        Grid(  # which of them matters, and the one by which our claims are judged
            {"dataset": ("mnist",)},
            lambda place: {"variant": CANDIDATES},
            {"measure": "validation", "method": "adam", "scenario": "domain"},
            "accuracy",
        ),
        Grid(
            {"dataset": ("mnist",), "scenario": SCENARIOS[:3], "method": METHODS[1:], "variant": ("sparse", "mlp")},
            lambda place: {"penalty": PENALTIES[place["method"]]},
            {"measure": "validation"},
            "accuracy",
        ),
    ],
    main={"method": ("adam",), "dataset": ("mnist",)},
)
