"""What makes a Neurocoder forget: Split MNIST again, watched, and with one thing changed at a time.

    neurocoder run forgetting --variant fixed-addresses --scenario task
    neurocoder sweep forgetting --seeds 3

After each task a copy of the network is kept. At the end it tells how far queries, keys, attention, programs and
outputs have moved since then, and what accuracy comes back when some of them are put back. The variants try what that
suggests; no claim is judged by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab import data, figures
from neurocoder_lab.continual import make
from neurocoder_lab.continual.digits import (
    BATCH,
    BENCHMARK,
    EPOCHS,
    EXAMPLES,
    NEUROCODER,
    TASKS,
    chosen_form,
    network,
    prepare,
)
from neurocoder_lab.continual.methods import TITLES, Method
from neurocoder_lab.continual.movement import MEASURES, SUBSETS, addresses, layers, moved, put_back
from neurocoder_lab.continual.stream import Stream
from neurocoder_lab.continual.training import METRICS, Learner, StreamConfig, check_form, orthogonal
from neurocoder_lab.errors import LabError
from neurocoder_lab.results import Runs, deviation, spread
from neurocoder_lab.task import Experiment, Picture, Table

Variant = Literal[
    "mlp",
    "neurocoder",
    "free-keys",
    "slow-addresses",
    "fixed-after-first",
    "fixed-addresses",
    "protected-slots",
    "fixed-and-protected",
    "read-rows",
    "fixed-and-read",
    "residual",
    "defaults",
]
MethodName = Literal["adam", "l2", "ewc", "oewc"]  # SI would count the steps that are taken back
Scenario = Literal["task", "domain"]
VARIANTS: tuple[Variant, ...] = Variant.__args__
METHODS: tuple[MethodName, ...] = MethodName.__args__
SCENARIOS: tuple[Scenario, ...] = Scenario.__args__
NAMES = {
    "mlp": "plain MLP",
    "neurocoder": "Neurocoder, as in Tables 3 and 4",
    "free-keys": "keys that are parameters, not made from slots",
    "slow-addresses": "the same; controller and keys move a tenth as far",
    "fixed-after-first": "the same; controller and keys fixed after the first task",
    "fixed-addresses": "the same; controller and keys fixed at random",
    "protected-slots": "free keys; slots move the less the more earlier tasks used them",
    "fixed-and-protected": "fixed at random, and slots protected",
    "read-rows": "free keys; only rows with more than the mean gradient of their bank move",
    "fixed-and-read": "fixed at random, and only such rows move",
    "residual": "Neurocoder with a residual program",
    "defaults": "nc.recode(model, '*'): residual program, reading controller",
}
FREE = nc.Rules(free_keys=("left", "right", "values"))
MOVED = {
    "queries": "queries (1 - cosine)",
    "keys": "keys (1 - cosine)",
    "attention": "attention (half the L1 distance)",
    "programs": "programs (over their length)",
    "outputs": "outputs (over their length)",
}
HIDDEN = 256
LOOKED_AT = 64  # images of the first task, whose programs are formed to see how far they moved


@dataclass(frozen=True)
class Hold:
    """Which updates are held back.

    Attributes:
        first, later: how much of its way a step of controller and keys goes, in the first task and in later ones.
        protected: slots go the less of theirs the more an earlier task used them.
        read: rows with less than the mean gradient of their bank stay: Adam would go on moving them.
    """

    first: float = 1.0
    later: float = 1.0
    protected: bool = False
    read: bool = False


HOLDS: dict[Variant, Hold] = {
    "slow-addresses": Hold(0.1, 0.1),
    "fixed-after-first": Hold(1.0, 0.0),
    "fixed-addresses": Hold(0.0, 0.0),
    "protected-slots": Hold(protected=True),
    "fixed-and-protected": Hold(0.0, 0.0, protected=True),
    "read-rows": Hold(read=True),
    "fixed-and-read": Hold(0.0, 0.0, read=True),
}
OWN_KEYS: tuple[Variant, ...] = ("neurocoder", "residual")  # made from slots


@dataclass(frozen=True)
class Forgetting(StreamConfig):
    """Split MNIST with 256 hidden units, watched."""

    variant: Variant = "neurocoder"
    """What is changed: see neurocoder report."""
    method: MethodName = "adam"
    """Plain training with Adam, or with a penalty of the benchmark's strength."""
    scenario: Scenario = "task"
    """task: told which task, a head each; domain: not told, two outputs."""
    sharpness: float | None = None
    """Of the Neurocoder's attention; by default as chosen for Split MNIST; 0 where that is not used."""
    orthogonal: float | None = None
    """Weight of the Neurocoder's orthogonal loss; by default as chosen for Split MNIST; 0 where that is not used."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_form(self, self.variant, recoded=self.variant not in ("mlp", "defaults"))
        if self.method == "adam" and self.penalty:
            raise LabError(f"adam has no penalty: --method {' '.join(METHODS[1:])} have")


def fill(config: Forgetting) -> dict[str, Any]:
    form = chosen_form(config.scenario)
    if config.variant in ("mlp", "defaults"):
        form = dict.fromkeys(form, 0.0)
    penalty = BENCHMARK[config.scenario].get(config.method, 0.0)
    return {"epochs": EPOCHS[config.budget], "examples": EXAMPLES[config.budget], "penalty": penalty} | form


def build(variant: Variant, scenario: Scenario, sharpness: float) -> nn.Module:
    model = network(scenario, HIDDEN)
    if variant == "defaults":
        nc.recode(model, "*")
    elif variant != "mlp":
        keys = {} if variant in OWN_KEYS else {"rules": FREE}
        nc.recode(model, "*", **NEUROCODER, **keys, sharpness=sharpness, residual=variant == "residual")
    return model


class Watched(Learner):
    """A learner that holds some updates back, and keeps what it was after each task."""

    def __init__(self, variant: Variant, model: nn.Module, stream: Stream, method: Method, epochs: int, **more: Any):
        optimiser = torch.optim.Adam(model.parameters(), lr=0.001, fused=True)
        super().__init__(model, optimiser, stream, method, epochs, BATCH, **more)
        self.hold = HOLDS.get(variant)
        self.copies: dict[int, dict[str, Tensor]] = {}
        self.used: dict[str, Tensor] = {}

    def update(self, task: int) -> None:
        """The optimiser's step, of which each parameter, or row of one, goes its share of the way."""
        moving = {name: p for name, p in self.model.named_parameters() if p.grad is not None and self.hold is not None}
        shares = {name: share for name, p in moving.items() if (share := self._share(name, p, task)) is not None}
        before = {name: moving[name].detach().clone() for name in shares}
        super().update(task)
        with torch.no_grad():
            for name, share in shares.items():
                moving[name].copy_(torch.lerp(before[name], moving[name], share))

    def _share(self, name: str, p: nn.Parameter, task: int) -> Tensor | None:
        """None: all of the way."""
        layer, in_memory, _ = name.partition(".memory.")
        if addresses(name):
            share = self.hold.later if task else self.hold.first
            return p.new_tensor(share) if share < 1 else None
        if not in_memory or not (self.hold.protected or self.hold.read):
            return None
        share_P = torch.ones_like(p[:, 0] if p.dim() > 1 else p)
        if self.hold.protected and layer in self.used:
            share_P = share_P * (1 - self.used[layer])
        if self.hold.read:
            size_P = p.grad.flatten(1).norm(dim=1) if p.dim() > 1 else p.grad.abs()
            share_P = share_P * (size_P >= size_P.mean())
        return share_P[:, None] if p.dim() > 1 else share_P

    @torch.no_grad()
    def _finish(self, task: int) -> None:
        super()._finish(task)
        self.copies[task] = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        x = self.stream.train[task][0][:1000].to(self.accelerator.device)
        with nc.trace(self.model) as seen:
            self.stream.logits(self.model, x, task)
        for name in layers(self.model):
            for call in seen.calls(name):
                use_P = torch.stack([*call.use().values()]).flatten(1, -2).mean((0, 1))
                use_P = use_P / use_P.max()
                self.used[name] = torch.maximum(self.used.get(name, torch.zeros_like(use_P)), use_P)

    def evaluate(self) -> dict[str, float]:
        measured = super().evaluate()
        if layers(self.model):
            x = self.stream.test[0][0][:LOOKED_AT].to(self.accelerator.device)
            first = partial(self.stream.logits, self.model, x, 0)
            by_layer = moved(self.model, self.copies[0], first)
            measured |= {f"moved_{what}": mean(part[what] for part in by_layer.values()) for what in MEASURES}
        return measured

    def conclude(self) -> dict[str, Any]:
        ending = super().conclude()
        if layers(self.model):
            worth = [put_back(self.model, then, partial(self._accuracy, task)) for task, then in self.copies.items()]
            ending["put_back"] = {name: mean(some[name] for some in worth) for name in worth[0]}
        return ending

    def _accuracy(self, task: int) -> float:
        """On the test data of an earlier task, in percent."""
        x, y = (tensor.to(self.accelerator.device) for tensor in self.stream.test[task])
        right = self.stream.logits(self.model, x, task, len(self.stream)).argmax(-1) == y
        return 100 * right.float().mean().item()

    def state(self) -> dict[str, Tensor]:
        copies = {f"copy.{task}.{name}": t for task, copy in self.copies.items() for name, t in copy.items()}
        return super().state() | copies | {f"used.{name}": t for name, t in self.used.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        for key, tensor in state.items():
            kind, _, rest = key.partition(".")
            if kind == "copy":
                task, _, name = rest.partition(".")
                self.copies.setdefault(int(task), {})[name] = tensor
            elif kind == "used":
                self.used[rest] = tensor.to(next(self.model.parameters()).device)


def start(config: Forgetting) -> Watched:
    digits = data.images("mnist")
    stream = config.stream(digits, TASKS, config.scenario, prepare)
    model = build(config.variant, config.scenario, config.sharpness)
    extra = orthogonal(model, config.orthogonal) if config.orthogonal else None
    method = make(config.method, model, config.penalty if config.method != "adam" else None)
    learner = Watched(config.variant, model, stream, method, config.epochs, extra=extra)
    learner.fingerprint = digits.fingerprint
    return learner


def tabulate(runs: Runs) -> list[Table]:
    """Accuracy of every variant, and what putting parts back is worth."""
    columns = [(scenario, method) for scenario in SCENARIOS for method in METHODS
               if runs.where(scenario=scenario, method=method)]  # fmt: skip
    header = ["variant", *(f"{scenario}, {TITLES[method]}" for scenario, method in columns)]

    def row(variant: Variant, metric: str) -> list[str]:
        cells = [runs.where(variant=variant, scenario=s, method=m).values(metric) for s, m in columns]
        return [NAMES[variant], *map(spread, cells)]

    known = [variant for variant in VARIANTS if runs.where(variant=variant)]
    tables = [
        (f"Split MNIST, {what}, %", header, [row(variant, metric) for variant in known])
        for metric, what in (("accuracy", "accuracy after the last task"), ("learned", "accuracy when just learned"))
    ]
    header = ["variant", *(" + ".join(subset) or "nothing" for subset in SUBSETS)]
    for scenario in SCENARIOS:
        mine = runs.where(scenario=scenario, method="adam")
        worth = {variant: [spread(_worth(mine, variant, subset)) for subset in SUBSETS] for variant in known}
        rows = [[NAMES[variant], *cells] for variant, cells in worth.items() if variant != "mlp"]
        if mine:
            title = f"{scenario} scenario, Adam: accuracy on tasks 1 to 4 at the end, with parts as they were, %"
            tables.append((title, header, rows))
    return tables


def _worth(runs: Runs, variant: Variant, subset: tuple[str, ...]) -> list[float]:
    """Accuracy on the earlier tasks with the parts put back, of each run."""
    endings = [run["final"] for run in runs.where(variant=variant)]
    return [ending["put_back"]["+".join(subset)] for ending in endings if "put_back" in ending]


def draw(runs: Runs) -> list[Picture]:
    """How far each part moves while tasks 2 to 5 are learned, and what putting it back is worth."""
    pictures = []
    for scenario in SCENARIOS:
        mine = runs.where(scenario=scenario, variant="neurocoder", method="adam")
        moves = {what: curve for what in MEASURES if (curve := mine.curve(f"moved_{what}")) is not None}
        if moves:
            title = f"{scenario} scenario, Adam: distance from what it was after task 1, for images of task 1"
            lines = {MOVED[what]: ([*range(1, len(steps) + 1)], *rest) for what, (steps, *rest) in moves.items()}
            pictures.append((title, figures.curves(lines, "distance", log=False, over="tasks learned")))
        points = {}
        for method in METHODS:
            here = runs.where(scenario=scenario, method=method)
            worth = [_worth(here, "neurocoder", subset) for subset in SUBSETS]
            if all(worth):
                points[TITLES[method]] = [(mean(values), deviation(values)) for values in worth]
        if points:
            title = f"{scenario} scenario: accuracy on tasks 1 to 4 at the end, with these parts put back"
            places = ["\n+ ".join(subset) or "nothing" for subset in SUBSETS]
            pictures.append((title, figures.dots(points, {}, places, "accuracy, %")))
    return pictures


EXPERIMENT = Experiment(
    name="forgetting",
    config=Forgetting,
    metrics=(*METRICS, *(f"moved_{what}" for what in MEASURES)),
    axes={"variant": VARIANTS, "method": METHODS, "scenario": SCENARIOS},
    fill=fill,
    start=start,
    figures=draw,
    tables=tabulate,
    main={"method": ("adam", "oewc")},
    tuned=("sharpness", "orthogonal"),
)
