"""Large memories of which each head reads a few slots (ours): what is kept, and what can be learned at all.

    neurocoder run large-memory --scenario domain
    neurocoder tune large-memory
    neurocoder sweep large-memory --seeds 10

Split MNIST, and Split CIFAR on features of a frozen backbone, with the networks of `continual/large_memory.py`: each of
many heads reads its best slot of a large memory by addresses that are fixed at random, and rows that are not read do
not move. Variants change one thing; `joint` learns all ten classes at once, which is the other side of the trade.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor

import neurocoder as nc
from neurocoder_lab import data, figures
from neurocoder_lab.continual import make
from neurocoder_lab.continual.digits import BATCH, EPOCHS, EXAMPLES, prepare
from neurocoder_lab.continual.digits import TASKS as DIGITS
from neurocoder_lab.continual.large_memory import CHANGES, NAMES, VARIANTS, Rows, Variant, build
from neurocoder_lab.continual.methods import TITLES
from neurocoder_lab.continual.optimisers import adam
from neurocoder_lab.continual.stream import MultiHead
from neurocoder_lab.continual.training import METRICS, Learner, StreamConfig
from neurocoder_lab.errors import LabError
from neurocoder_lab.features import features
from neurocoder_lab.results import Runs, deviation, spread, told
from neurocoder_lab.task import Experiment, Grid, Picture, Table
from neurocoder_lab.tuning import best, known

Dataset = Literal["mnist", "cifar10"]
MethodName = Literal["adam", "oewc", "si"]
Scenario = Literal["task", "domain", "class", "joint"]
DATASETS: tuple[Dataset, ...] = Dataset.__args__
METHODS: tuple[MethodName, ...] = MethodName.__args__
SCENARIOS: tuple[Scenario, ...] = Scenario.__args__
CIFAR = [[*range(first, first + 2)] for first in range(0, 10, 2)]
RATES = (0.0001, 0.0003, 0.001, 0.003)
COMPARED: tuple[Variant, ...] = ("sparse", "linear", "mlp", "moe", "peer")
PENALISED: tuple[Variant, ...] = ("sparse", "mlp")
PENALTIES = {"oewc": (10.0, 100.0, 1000.0, 10_000.0), "si": (30.0, 300.0, 3000.0, 30_000.0)}
CHOSEN = {"dataset": "mnist"}  # where held-out data choose between the variants
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
    rate: float | None = None
    """Learning rate of Adam; by default as chosen on held-out digits, for a variant of `sparse` as for that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("rate")
        if self.method == "adam" and self.penalty:
            raise LabError(f"adam has no penalty: --method {' '.join(METHODS[1:])} have")
        if self.method != "adam" and self.variant in COMPARED and self.variant not in PENALISED:
            raise LabError(f"{self.variant} learns by adam alone: penalties are chosen for memories and mlp")
        if self.method != "adam" and self.scenario == "joint":
            raise LabError("nothing is forgotten where all classes are learned at once: --method adam")


def fill(config: LargeMemory) -> dict[str, Any]:
    like = config.variant if config.variant in COMPARED else "sparse"
    penalty = 0.0 if config.method == "adam" else best("large-memory", "penalty", variant=like, method=config.method)
    rate = best("large-memory", "rate", variant=like) or 0.001
    return {"epochs": EPOCHS[config.budget], "examples": EXAMPLES[config.budget], "penalty": penalty, "rate": rate}


class Reader(Learner):
    """A learner that looks at which slots each task reads, and how far later tasks move what is stored there."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        layers = (module for module in self.model.modules() if isinstance(module, nc.Linear))
        self.layer = next(layers, None)  # the first that reads a memory
        self.right: dict[str, Tensor] = {}  # its right programs when a task had been learned

    @torch.no_grad()
    def _reads(self, layer: nc.Linear, task: int) -> Tensor:
        """How often that layer reads each slot for images of a task: shares that sum to 1."""
        counts = torch.zeros(layer.slots)

        def look(layer: nc.Linear, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            reads = named["reads"] if "reads" in named else layer.reads(*given)
            counts.add_(torch.bincount(reads[:, 1].flatten(), minlength=layer.slots).cpu())

        hook = layer.register_forward_pre_hook(look, with_kwargs=True)
        for x in self.stream.test[task][0][:LOOKED_AT].split(BATCH):
            self.stream.logits(self.model, x.to(self.accelerator.device), task)
        hook.remove()
        return counts / counts.sum()

    def _stored(self, layer: nc.Linear) -> Tensor:
        return layer.memory.right.detach().cpu().clone()

    def _finish(self, task: int) -> None:
        super()._finish(task)
        if self.layer is not None:
            self.right[str(task)] = self._stored(self.layer)

    def conclude(self) -> dict[str, Any]:
        ending = super().conclude()
        if self.layer is None or not self.right:
            return ending
        reads = torch.stack([self._reads(self.layer, task) for task in range(len(self.stream))])
        now, overwritten = self._stored(self.layer), []
        for task, then in self.right.items():
            moved, stored = (reads[int(task)] @ rows.norm(dim=1) for rows in (now - then, then))
            overwritten.append(round((moved / stored).item(), 4))
        common = torch.minimum(reads[:, None], reads[None]).sum(-1)
        shared = [[round(share, 4) for share in row] for row in common.tolist()]
        return ending | {"shared_reads": shared, "overwritten": overwritten}

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"right.{task}": tensor for task, tensor in self.right.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.right = {name.removeprefix("right."): t for name, t in state.items() if name.startswith("right.")}


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
    first = (model.body if isinstance(model, MultiHead) else model)[0]
    if isinstance(first, Rows) and first.looks_once:
        train, test = (tuple((first.look(x), y) for x, y in part) for part in (stream.train, stream.test))
        stream = replace(stream, train=train, test=test)
    method = make(config.method, model, config.penalty if config.method != "adam" else None)
    wanted = (lambda task: nc.auxiliary(model)) if config.variant == "moe" else None  # what trains its gates
    learner = Reader(model, adam(model, config.rate), stream, method, config.epochs, BATCH, wanted)
    learner.fingerprint = examples.fingerprint
    return learner


def tabulate(runs: Runs) -> list[Table]:
    """Accuracy of every variant in every scenario, one table a data set; and what held-out digits said of them."""
    tables: list[Table] = []
    for dataset in DATASETS:
        here = runs.where(dataset=dataset)
        places = product(SCENARIOS, METHODS)
        columns = [(s, m) for s, m in places if here.where(scenario=s, method=m)]
        header = ["variant", "what it is", "trained parameters", *(f"{s}, {TITLES[m]}" for s, m in columns)]
        rows = []
        for variant in VARIANTS:
            if mine := here.where(variant=variant):
                cells = [spread(mine.where(scenario=s, method=m).values("accuracy")) for s, m in columns]
                rows.append([variant, NAMES[variant], f"{mine[0]['final']['parameters']:,}", *cells])
        if rows:
            tables.append((f"Large memories, {dataset}: accuracy after the last task, %", header, rows))
    for row in known():
        if (row["experiment"], row["place"]) == ("large-memory", CHOSEN):
            title = "What of it matters: domain scenario, Adam alone, held-out digits, accuracy after the last task, %"
            rows = []
            for one in row["tried"]:
                cell = told(one["mean"], one["std"], one["n"]) if one["n"] else "failed"
                rows.append([one["values"]["variant"], NAMES[one["values"]["variant"]], cell])
            tables.append((title, ["variant", "what it is", "accuracy"], rows))
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
    for variant in dict.fromkeys((best("large-memory", "variant", **CHOSEN) or "sparse", "learned", "ordinary")):
        ended = [run["final"] for run in digits.where(variant=variant, scenario="domain")]
        ended = [final for final in ended if "shared_reads" in final]
        if ended:
            table, moved = (
                torch.tensor([final[name] for final in ended]).mean(0).tolist()
                for name in ("shared_reads", "overwritten")
            )
            title = f"Split MNIST, domain, {variant}: reads that two tasks share, and how far later ones moved them"
            pictures.append((title, figures.shared(table, moved)))
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
        Grid(
            {"variant": COMPARED},
            lambda place: {"rate": RATES},
            {"measure": "validation", "method": "adam", "scenario": "domain", "dataset": "mnist"},
            "accuracy",
        ),
        Grid(  # which of them matters, and the one by which our claims are judged
            {name: (value,) for name, value in CHOSEN.items()},
            lambda place: {"variant": CANDIDATES},
            {"measure": "validation", "method": "adam", "scenario": "domain"},
            "accuracy",
        ),
        Grid(  # in the domain scenario, for all three
            {"variant": PENALISED, "method": METHODS[1:]},
            lambda place: {"penalty": PENALTIES[place["method"]]},
            {"measure": "validation", "scenario": "domain", "dataset": "mnist"},
            "accuracy",
        ),
    ],
    main={"method": ("adam",), "dataset": ("mnist",)},
)
