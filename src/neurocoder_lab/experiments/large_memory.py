"""Large memories of which each head reads a few slots (ours): what is kept, and what can be learned at all.

    neurocoder run large-memory --scenario domain
    neurocoder tune large-memory
    neurocoder sweep large-memory --seeds 3

Split MNIST, and Split CIFAR on features of a frozen backbone, with the networks of `continual/large_memory.py`: each of
many heads reads its best slot of a large memory by addresses that are fixed at random, and rows that are not read do
not move. Variants change one thing; `joint` learns all ten classes at once, which is the other side of the trade.

The learning rate decides how much is forgotten, of a plain network most of all: each that is compared gets its own for
every scenario, but a memory has that of the domain scenario for all classes at once, as one setting that does both;
`balanced` is that memory at the rate with the best mean of the two, `balanced-512` has 512 heads as well, and
`balanced-winners` is `winners` at such a rate. Variants have that of the domain scenario everywhere. Penalties are
chosen together with a rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor

import neurocoder as nc
from neurocoder_lab import data, figures, tuning
from neurocoder_lab.continual import make
from neurocoder_lab.continual.digits import BATCH, EPOCHS, EXAMPLES, TASKS, prepare
from neurocoder_lab.continual.large_memory import NAMES, VARIANTS, Variant, build, looker
from neurocoder_lab.continual.methods import TITLES
from neurocoder_lab.continual.optimisers import adam
from neurocoder_lab.continual.stream import MultiHead
from neurocoder_lab.continual.training import METRICS, Learner, StreamConfig
from neurocoder_lab.errors import LabError
from neurocoder_lab.features import features
from neurocoder_lab.results import Runs, deviation, spread, told
from neurocoder_lab.task import Experiment, Grid, Picture, Table
from neurocoder_lab.tuning import best

Dataset = Literal["mnist", "cifar10"]
MethodName = Literal["adam", "oewc", "si"]
Scenario = Literal["task", "domain", "class", "joint"]
DATASETS: tuple[Dataset, ...] = Dataset.__args__
METHODS: tuple[MethodName, ...] = MethodName.__args__
SCENARIOS: tuple[Scenario, ...] = Scenario.__args__
PLAIN: tuple[Variant, ...] = ("linear", "features", "winners", "mlp", "moe", "peer")
COMPARED: tuple[Variant, ...] = ("sparse", *PLAIN)
BALANCED: tuple[Variant, ...] = ("balanced", "balanced-512", "balanced-winners")
NEAR = tuple(v for v in VARIANTS if v not in (*COMPARED, *BALANCED, "two-hidden"))  # `sparse` but for one thing
PENALISED: tuple[Variant, ...] = ("sparse", "mlp")
LINES: dict[str, tuple[Variant, ...]] = {  # what changes by degrees
    "slots": ("slots-256", "slots-1024", "slots-4096", "sparse"),
    "heads": ("heads-32", "sparse", "heads-512"),
    "heads, at a rate for both": ("balanced", "balanced-512"),
    "slots a head reads": ("sparse", "top-2", "top-4"),
    "sharpness": ("top-4", "soft-reads"),
    "learning rate": ("sparse", "balanced"),
}
# ladders: not all are tried
RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1)
PENALTIES = tuple(10.0**power for power in range(-3, 11))
UNTUNED = 1e-4
LOOKED_AT = 1000  # images of each task, to see which slots they read
BUSIEST = 100  # slots, those that are read most


@dataclass(frozen=True)
class LargeMemory(StreamConfig):
    """Split MNIST or Split CIFAR-10 with large memories, each head of which reads a few slots."""

    variant: Variant = "sparse"
    """What is changed: the table of neurocoder report says it in words, and `NAMES` in continual/large_memory.py."""
    method: MethodName = "adam"
    """Plain training with Adam, or with online EWC or SI on top."""
    scenario: Scenario = "domain"
    """task, domain, class: as in Split MNIST; joint: all ten classes at once, trained as long as the tasks together."""
    dataset: Dataset = "mnist"
    """mnist: digits; cifar10: features of a frozen backbone."""
    rate: float | None = None
    """Learning rate of Adam; by default as chosen on held-out data for the variant, and if it can be the scenario."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("rate")
        if self.method == "adam" and self.penalty:
            raise LabError(f"adam has no penalty: --method {' '.join(METHODS[1:])} have")
        if self.method != "adam" and self.variant in (*COMPARED, *BALANCED) and self.variant not in PENALISED:
            raise LabError(f"{self.variant} learns by adam alone: penalties are chosen for memories and mlp")
        if self.method != "adam" and self.dataset != DATASETS[0]:
            raise LabError(f"{self.dataset} is learned by adam alone: penalties are chosen on {DATASETS[0]}")
        if self.method != "adam" and self.scenario == "joint":
            raise LabError("nothing is forgotten where all classes are learned at once: --method adam")


def fill(config: LargeMemory) -> dict[str, Any]:
    rate, penalty = _rate(config.variant, config.scenario, config.dataset), 0.0
    if config.method != "adam":
        like = config.variant if config.variant in PENALISED else "sparse"
        place = {"variant": like, "method": config.method, "scenario": config.scenario}
        rate, penalty = (best("large-memory", name, **place) for name in ("rate", "penalty"))
    sizes = {"epochs": EPOCHS[config.budget], "examples": EXAMPLES[config.budget]}
    return sizes | {"penalty": penalty, "rate": rate or UNTUNED}


def _rate(variant: Variant, scenario: Scenario, dataset: Dataset) -> float:
    """As chosen there; else in the domain scenario, which all are tuned in; else on digits."""
    places = [{} if variant in BALANCED else {"scenario": where} for where in (scenario, "domain")]
    for data_set, place in product(dict.fromkeys((dataset, DATASETS[0])), places):
        rate = best("large-memory", "rate", variant=variant, dataset=data_set, **place)
        if rate is not None:
            return rate
    return UNTUNED


class Reader(Learner):
    """A learner that looks at which slots each task reads, and how far later tasks move what is stored there."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        shared = self.model.body if isinstance(self.model, MultiHead) else self.model
        layers = (module for module in shared.modules() if isinstance(module, nc.Linear))
        self.layer = next(layers, None)  # the first that reads a memory, of those that serve all tasks
        self.then: dict[str, Tensor] = {}  # when a task had been learned: what it read, and its right programs

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
            self.then |= {f"reads.{task}": self._reads(self.layer, task), f"right.{task}": self._stored(self.layer)}

    def conclude(self) -> dict[str, Any]:
        ending = super().conclude()
        if self.layer is None or not self.then:
            return ending
        tasks = range(len(self.stream))
        reads, now = torch.stack([self._reads(self.layer, task) for task in tasks]), self._stored(self.layer)
        overwritten, elsewhere = [], []
        for task in tasks[:-1]:
            read, then = self.then[f"reads.{task}"], self.then[f"right.{task}"]
            moved, stored = (read @ rows.norm(dim=1) for rows in (now - then, then))
            overwritten.append((moved / stored).item())
            elsewhere.append(1 - torch.minimum(read, reads[task]).sum().item())
        common = torch.minimum(reads[:, None], reads[None]).sum(-1)
        busiest = reads[:, reads.sum(0).topk(min(BUSIEST, reads.shape[1])).indices]
        seen = {
            "shared_reads": common,
            "overwritten": torch.tensor(overwritten),
            "reads_elsewhere": torch.tensor(elsewhere),
            "busiest": busiest / busiest.sum(0),
        }
        return ending | {name: _rounded(tensor) for name, tensor in seen.items()}

    def state(self) -> dict[str, Tensor]:
        return super().state() | {f"then.{name}": tensor for name, tensor in self.then.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.then = {name.removeprefix("then."): t for name, t in state.items() if name.startswith("then.")}


def _rounded(tensor: Tensor) -> list[Any]:
    return [_rounded(part) if part.dim() else round(part.item(), 4) for part in tensor]


def start(config: LargeMemory) -> Reader:
    if config.penalty is None:
        raise LabError("this is not tuned yet: neurocoder tune large-memory --settings penalty")
    digits = config.dataset == "mnist"
    examples = data.images("mnist") if digits else features(config.dataset)
    joint = config.scenario == "joint"
    ready = prepare if digits else Tensor.float
    model = build(config.variant, config.scenario, ready(examples.test[0][:1]).shape[1])
    look = looker(model)
    stream = config.stream(
        examples,
        [[*range(10)]] if joint else TASKS,
        "class" if joint else config.scenario,
        ready if look is None else lambda x: look.look(ready(x)),
    )
    method = make(config.method, model, config.penalty if config.method != "adam" else None)
    wanted = (lambda task: nc.auxiliary(model)) if config.variant == "moe" else None  # what trains its gates
    learner = Reader(model, adam(model, config.rate), stream, method, config.epochs, BATCH, wanted)
    learner.fingerprint = examples.fingerprint
    return learner


def tabulate(runs: Runs) -> list[Table]:
    """Accuracy of every variant in every scenario, one table a data set; and what held-out data said of them."""
    tables: list[Table] = []
    for dataset in DATASETS:
        here = runs.where(dataset=dataset)
        places = product(SCENARIOS, METHODS)
        columns = [(s, m) for s, m in places if here.where(scenario=s, method=m)]
        titles = [f"{s}, {TITLES[m]}" for s, m in columns]
        header = ["variant", "what it is", "trained parameters", *titles, "domain, Adam: each just learned"]
        rows = []
        for variant in VARIANTS:
            if mine := here.where(variant=variant):
                sizes = sorted({run["final"]["parameters"] for run in mine})
                cells = [spread(mine.where(scenario=s, method=m).values("accuracy")) for s, m in columns]
                learned = spread(mine.where(scenario="domain", method="adam").values("learned"))
                size = " to ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1])))
                rows.append([variant, NAMES[variant], size, *cells, learned])
        if rows:
            tables.append((f"Large memories, {dataset}: accuracy after the last task, %", header, rows))
        rows = []
        for row in _tuned(dataset):
            one, variant = tuning.chosen(row), row["place"]["variant"]
            cell = told(one["mean"], one["std"], one["n"])
            rows.append([variant, NAMES[variant], f"{one['values']['rate']:g}", cell])
        if rows:
            title = f"What of it matters, {dataset}: domain scenario, Adam alone, held-out data, after the last task, %"
            tables.append((title, ["variant", "what it is", "learning rate", "accuracy"], rows))
    return tables


def _tuned(dataset: Dataset) -> list[tuning.Row]:
    """What tuning found about the rate of each variant in the domain scenario."""
    places = [{"variant": variant, "scenario": "domain", "dataset": dataset} for variant in VARIANTS]
    return [row for row in tuning.known() if row["experiment"] == "large-memory" and row["place"] in places]


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
        title += f" ({', '.join(PLAIN)} at a rate of their own for each, the others at one for both)"
        words = "all ten digits at once: accuracy, %", "domain scenario, after the last task: accuracy, %"
        pictures.append((title, figures.trade(points, LINES, *words)))
    for variant in ("sparse", "learned", "ordinary"):
        ran = sorted(digits.where(variant=variant, scenario="domain"), key=lambda run: run["config"]["seed"])
        ended = [run["final"] for run in ran]
        ended = [final for final in ended if "shared_reads" in final]
        if ended:
            seen = {
                name: torch.tensor([final[name] for final in ended]).mean(0).tolist()
                for name in ("shared_reads", "overwritten", "reads_elsewhere")
            }
            title = (
                f"Split MNIST, domain, {variant}: the {BUSIEST} slots that are read most, and by which task (seed 0); "
            )
            title += "reads that two tasks share, and what later tasks changed"
            pictures.append((title, figures.reads(ended[0]["busiest"], *seen.values())))
    return pictures


def _rates(place: dict[str, Any]) -> tuple[float, ...]:
    """What is tried with a penalty: the rate of Adam alone, and larger ones, of which a penalty may keep more."""
    at = RATES.index(_rate(place["variant"], place["scenario"], DATASETS[0]))
    return RATES[at : at + 7]


def _ladder(place: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """All rates; of a memory that differs from `sparse` in one thing those around that of `sparse`, and of pictures
    those around that of digits."""
    if place["variant"] in NEAR:
        known = _rate("sparse", place["scenario"], place["dataset"])
    elif place["dataset"] != DATASETS[0]:
        known = _rate(place["variant"], place["scenario"], DATASETS[0])
    else:
        return {"rate": RATES}
    at = RATES.index(known)
    return {"rate": RATES[max(at - 5, 0) : at + 4]}  # what moves more than rows learns slower


HELD_OUT = {"measure": "validation", "method": "adam"}
BOTH = {"scenario": ("domain", "joint")}  # what the rate of `balanced` is chosen for
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
        Grid(places, _ladder, HELD_OUT, "accuracy", ladder=True)
        for places in (
            {"variant": (*COMPARED, "two-hidden"), "scenario": ("domain",), "dataset": ("mnist",)},
            {"variant": NEAR, "scenario": ("domain",), "dataset": ("mnist",)},
            {"variant": COMPARED, "scenario": ("task", "class"), "dataset": ("mnist",)},
            {"variant": PLAIN, "scenario": ("joint",), "dataset": ("mnist",)},
            {"variant": COMPARED, "scenario": ("task", "domain", "class"), "dataset": ("cifar10",)},
            {"variant": PLAIN, "scenario": ("joint",), "dataset": ("cifar10",)},
        )
    ]
    + [
        Grid({"variant": BALANCED, "dataset": ("mnist",)}, _ladder, HELD_OUT, "accuracy", across=BOTH, ladder=True),
        Grid(
            {"variant": PENALISED, "method": METHODS[1:], "scenario": ("task", "domain", "class")},
            lambda place: {"rate": _rates(place), "penalty": PENALTIES},
            {"measure": "validation", "dataset": "mnist"},
            "accuracy",
            ladder=True,
        ),
    ],
    main={"method": ("adam",), "dataset": ("mnist",)},
)
