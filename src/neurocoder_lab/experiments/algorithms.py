"""Multi-task algorithms (Fig 7 of Neurocoder's later appendix): a Neural Turing Machine whose interface is re-coded.

    neurocoder run algorithms --model neurocoder --tasks 2
    neurocoder sweep algorithms --seeds 3
    neurocoder sweep algorithms --setting copy --model ntm

A sequence chains tasks of four algorithms, inputs first, then all answers: `neurocoder_lab.chains` has them. What the
network was when it did best on held-out sequences is kept, and measured on longer tasks and on more of them than it was
trained on.
docs/paper.md has what the paper leaves open.

Shapes: B sequences, T steps, X bits, P programs; others as in `chains`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

import neurocoder as nc
from neurocoder_lab import figures
from neurocoder_lab.attention import information, rounded, table
from neurocoder_lab.chains import ALGORITHMS, BITS, WIDTH, Chains, Ranges, answers, chains, lengths
from neurocoder_lab.errors import LabError
from neurocoder_lab.results import Runs, deviation, spread
from neurocoder_lab.task import Config, Experiment, Picture, Table, Task
from neurocoder_lab.turing import TuringMachine

Model = Literal["ntm", "nsm", "hypernet", "film", "neurocoder"]
Setting = Literal["chain", "copy"]
MODELS: tuple[Model, ...] = Model.__args__
SETTINGS: tuple[Setting, ...] = Setting.__args__
TASKS = (1, 2, 4, 8)  # a sequence
NAMES = {"ntm": "NTM", "nsm": "NSM", "hypernet": "HyperNet", "film": "FiLM", "neurocoder": "Neurocoder"}

# units of the controller, so that each has the paper's size; it prints none for HyperNet: Neurocoder's
HIDDEN = {"ntm": 250, "nsm": 154, "hypernet": 203, "film": 204, "neurocoder": 210}
PAPER = {"ntm": 308_000, "nsm": 264_000, "film": 254_000, "neurocoder": 255_000}
INTERFACES: dict[str, dict[str, Any]] = {
    "nsm": {"layer": nc.peers.StoredProgramMemory, "programs": 10},
    "hypernet": {"layer": nc.peers.HyperLinear},
    "film": {"layer": nc.peers.FiLM},
    "neurocoder": {"slots": 30, "heads": 5, "key_dim": 5, "least_used": 2, "residual": True},
}
ORTHOGONAL = 10.0
BATCH, CLIP = 64, 10.0
RATE, ALPHA, MOMENTUM = 1e-4, 0.95, 0.9  # of RMSProp; the last two are those of NSM's published code
ITERATIONS = {
    "chain": {"smoke": 30, "desk": 8000, "paper": 100_000},
    "copy": {"smoke": 30, "desk": 4000, "paper": 10_000},
}
EVALUATIONS = 80
TEST = {"smoke": 64, "desk": 1024, "paper": 1024}  # sequences of every testing setting; a quarter for validation
AT_ONCE = 256  # sequences in one forward when measuring

TRAINED = {"chain": Ranges(), "copy": Ranges(length=(1, 10))}
TESTED = {  # by what a metric is called, behind "bit_error"
    "longer": Ranges(length=(4, 6)),
    "more_repeats": Ranges(repeats=(3, 4)),
    "more_items": Ranges(recalled=(4, 5), sorted=(4, 5)),
    "more_tasks": Ranges(),
}
MORE_TASKS = 2
SOLVED = 1.0  # percent of wrong bits
PLACES = {
    "bit_error": "as in training",
    "bit_error_longer": "lengths\n4 to 6",
    "bit_error_more_repeats": "3 to 4\nrepeats",
    "bit_error_more_items": "4 to 5\nitems",
    "bit_error_more_tasks": "2 more\ntasks",
}


@dataclass(frozen=True)
class Algorithms(Config):
    """Chains of algorithmic tasks by a Neural Turing Machine."""

    setting: Setting = "chain"
    """chain: several tasks of four algorithms a sequence; copy: Copy alone, lengths 1 to 10."""
    model: Model = "neurocoder"
    """What becomes of the machine's interface; controllers are as wide as the sizes of the paper allow."""
    tasks: int | None = None
    """Tasks of a sequence: by default 2, of budget paper 8, of copy 1."""
    iterations: int | None = None
    """Training steps, of 64 fresh sequences each."""
    rate: float = RATE
    """Learning rate of RMSProp."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("tasks", "iterations")
        if self.tasks is not None and (self.tasks == 1) != (self.setting == "copy"):
            raise LabError(
                f"copy has one task a sequence, chain at least two; got --tasks {self.tasks} of {self.setting}"
            )
        self.check_positive("rate")


def fill(config: Algorithms) -> dict[str, Any]:
    tasks = 1 if config.setting == "copy" else 8 if config.budget == "paper" else 2
    return {"tasks": tasks, "iterations": ITERATIONS[config.setting][config.budget]}


def build(model: Model, hidden: int | None = None) -> TuringMachine:
    """The machine with that interface, of the size of the paper's unless its controller's units are given."""
    machine = TuringMachine(WIDTH, BITS, hidden or HIDDEN[model])
    if model in INTERFACES:
        nc.recode(machine, "interface", **INTERFACES[model])
    return machine


def by_sequence(value_BTX: Tensor, phase_BT: Tensor) -> Tensor:
    """The mean over the bits that are to be answered, of each sequence; nothing else is looked at."""
    wanted_BT = answers(phase_BT)
    return torch.where(wanted_BT, value_BTX.mean(-1), 0).sum(1) / wanted_BT.sum(1)


def bit_errors(logits_BTX: Tensor, y_BTX: Tensor, phase_BT: Tensor) -> Tensor:
    """Wrong bits of each sequence, in percent of those that are to be answered."""
    return 100 * by_sequence(((logits_BTX > 0) != (y_BTX > 0)).float(), phase_BT)


def objective(model: TuringMachine, logits_BTX: Tensor, y_BTX: Tensor, phase_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and the same with what a Neurocoder wants added."""
    loss = by_sequence(F.binary_cross_entropy_with_logits(logits_BTX, y_BTX, reduction="none"), phase_BT).mean()
    return loss, loss + ORTHOGONAL * nc.orthogonality(model) if isinstance(model.interface, nc.Linear) else loss


def optimiser(model: TuringMachine, rate: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=rate, alpha=ALPHA, momentum=MOMENTUM)


class Learner(Task):
    """Trains a machine; what it was when it did best on held-out sequences is kept, and measured at the end."""

    def __init__(self, config: Algorithms):
        model = build(config.model)
        steps = config.iterations
        super().__init__(model, optimiser(model, config.rate), steps, max(steps // EVALUATIONS, 1))
        self.tasks, self.ranges = int(config.tasks), TRAINED[config.setting]
        self.only = torch.zeros(BATCH, 1, dtype=torch.long) if config.setting == "copy" else None
        self.least, self.best = inf, {name: tensor.clone() for name, tensor in model.state_dict().items()}
        held_out = torch.Generator().manual_seed(1_000_003)  # the same for every model and seed
        count = TEST[config.budget]
        self.validation = self._held_out(count // 4, held_out)
        self.tests = {"bit_error": self._held_out(count, held_out)}
        for name, ranges in TESTED.items() if config.setting == "chain" else ():
            tasks = self.tasks + (MORE_TASKS if name == "more_tasks" else 0)
            self.tests[f"bit_error_{name}"] = chains(count, tasks, ranges, generator=held_out)
        self.examples = self._examples(held_out)

    def _held_out(self, count: int, generator: torch.Generator) -> Chains:
        only = None if self.only is None else self.only[:1].expand(count, -1)
        return chains(count, self.tasks, self.ranges, only, generator)

    def _examples(self, generator: torch.Generator) -> Chains:
        """Few sequences that have every algorithm once or more, as long as they can be: to look at."""
        every_BK = torch.zeros(1, 1, dtype=torch.long)
        if self.only is None:
            count = -(-len(ALGORITHMS) // self.tasks)
            every_BK = torch.arange(count * self.tasks).view(count, self.tasks) % len(ALGORITHMS)
        longest = Ranges(**{name: (most, most) for name, (_, most) in vars(self.ranges).items()})
        return chains(len(every_BK), self.tasks, longest, every_BK, generator)

    def step(self, index: int) -> dict[str, Tensor]:
        x, y, phase = self.share(*chains(BATCH, self.tasks, self.ranges, self.only))
        logits = self.network(x, lengths(phase))
        loss, whole = objective(self.model, logits, y, phase)
        self.learn(whole, clip=CLIP)
        return {"loss": loss, "train": bit_errors(logits.detach(), y, phase).mean()}

    def error(self, data: Chains) -> float:
        """The bit error, in percent."""
        device, total = self.accelerator.device, 0.0
        for x, y, phase in zip(*(part.to(device).split(AT_ONCE) for part in data), strict=True):
            total += bit_errors(self.model(x, lengths(phase)), y, phase).sum().item()
        return total / len(data.x_BTX)

    def evaluate(self) -> dict[str, float]:
        error = self.error(self.validation)
        if error < self.least:
            self.least, self.best = error, {name: t.clone() for name, t in self.model.state_dict().items()}
        return {"validation": error}

    def conclude(self) -> dict[str, Any]:
        self.model.load_state_dict(self.best)
        ending: dict[str, Any] = {"best_validation": self.least}
        ending |= {name: self.error(data) for name, data in self.tests.items()}
        if isinstance(self.model.interface, nc.Linear | nc.peers.StoredProgramMemory):
            ending |= self.inside()
        return ending

    def inside(self) -> dict[str, Any]:
        """Which programs the interface uses while, and how much the most used one tells about what a step is for."""
        use_BTP, phase_BT = self._use(self.examples)
        examples = [
            {"use": rounded(use_TP[phase_T >= 0]), "phases": phase_T[phase_T >= 0].tolist()}
            for use_TP, phase_T in zip(use_BTP, phase_BT, strict=True)
        ]
        use_BTP, phase_BT = self._use(self.validation)
        there_BT = phase_BT >= 0
        counts = table(use_BTP[there_BT].argmax(-1), phase_BT[there_BT], use_BTP.shape[-1], len(PHASES))
        return {"programs": examples, "phase_told": information(counts)}

    def _use(self, data: Chains) -> tuple[Tensor, Tensor]:
        """The share of each program (B, T, P), of a Neurocoder those of M_U, and the phases (B, T)."""
        with nc.trace(self.model) as seen:
            self.model(data.x_BTX.to(self.accelerator.device))
        use = seen.stacked("interface").use()
        use_TBP = use["left"] if isinstance(use, dict) else use
        return (use_TBP / use_TBP.sum(-1, keepdim=True)).transpose(0, 1).cpu(), data.phase_BT

    def state(self) -> dict[str, Tensor]:
        kept = {f"best.{name}": tensor for name, tensor in self.best.items()}
        return {"least": torch.tensor(self.least, dtype=torch.float64)} | kept

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.least = state["least"].item()
        self.best = {name: state[f"best.{name}"] for name in self.best}


SHORT = ("copy", "repeat", "recall", "sort")
PHASES = [*(f"in: {name}" for name in SHORT), "call", *(f"out: {name}" for name in SHORT)]  # by number


def _about(run: dict[str, Any]) -> str:
    config = run["config"]
    length = f"{config['iterations']:,} iterations"
    if config["setting"] == "copy":
        return f"Copy alone, lengths 1 to 10, {length} (not in the paper)"
    return f"{config['tasks']} tasks a sequence, {length}" + ("" if config["budget"] == "paper" else ", shortened")


def _by_length(runs: Runs) -> list[Runs]:
    """Those that can be compared: of the same setting, tasks and length."""
    keys = ("setting", "tasks", "iterations")
    places = sorted({tuple(run["config"][key] for key in keys) for run in runs})
    return [runs.where(**dict(zip(keys, place, strict=True))) for place in places]


def draw(runs: Runs) -> list[Picture]:
    """Fig 7, left and right, and the programs over time."""
    pictures = []
    for mine in _by_length(runs):
        ran = [model for model in MODELS if mine.where(model=model)]
        lines = {NAMES[model]: mine.where(model=model).curve("validation") for model in ran}
        title = f"{_about(mine[0])}: bit error on held-out sequences, {mine.shown()}"
        places = [name for name in PLACES if mine.values(name)]
        if len(places) == 1:
            pictures.append((title, figures.curves(lines, "bit error, %", log=False)))
            continue
        pictures.append((f"Fig 7 left, {title}", figures.curves(lines, "bit error, %", log=False)))
        points = {}
        for model in ran:
            values = [mine.where(model=model).values(place) for place in places]
            points[NAMES[model]] = [(mean(some), deviation(some)) for some in values]
        title = f"Fig 7 right, {_about(mine[0])}: bit error of the best network, {mine.shown()}"
        pictures.append((title, figures.dots(points, {}, [PLACES[place] for place in places], "bit error, %")))
        pictures += [
            _programs(run) for model in ran for run in mine.where(model=model)[:1] if "programs" in run["final"]
        ]
    return pictures


def _programs(run: dict[str, Any]) -> Picture:
    name, seed = NAMES[run["config"]["model"]], run["config"]["seed"]
    title = f"{name}, {_about(run)}, seed {seed}: the programs that its interface uses, step by step"
    return title, figures.over_time(run["final"]["programs"], PHASES)


def tabulate(runs: Runs) -> list[Table]:
    """Sizes beside the paper's, and the bit error in every testing setting."""
    tables = []
    for mine in _by_length(runs):
        places = [name for name in PLACES if mine.values(name)]
        last = "phase told by the program" if len(places) > 1 else f"iterations to less than {SOLVED:g}%"
        header = ["interface", "LSTM", "parameters", "paper's"]
        header += [*(PLACES[place].replace("\n", " ") for place in places), last]
        rows = []
        for model in MODELS:
            ran = mine.where(model=model)
            if ran:
                theirs = f"{PAPER[model]:,}" if model in PAPER else "-"
                errors = [spread(ran.values(place), 3) for place in places]
                size = [NAMES[model], str(HIDDEN[model]), f"{ran[0]['final']['parameters']:,}", theirs]
                ending = ran.values("phase_told") if len(places) > 1 else [n for run in ran for n in _solved(run)]
                rows.append([*size, *errors, spread(ending, 2 if len(places) > 1 else 4)])
        tables.append((f"{_about(mine[0])}: bit error, % (the paper prints figures, no numbers)", header, rows))
    return tables


def _solved(run: dict[str, Any]) -> list[float]:
    """The iterations after which held-out sequences first have less than 1% of wrong bits, if they ever do."""
    curve = run["curve"]
    return [step for step, error in zip(curve["step"], curve["validation"], strict=True) if error < SOLVED][:1]


EXPERIMENT = Experiment(
    name="algorithms",
    config=Algorithms,
    metrics=("steps", "parameters", "loss", "train", "validation", "best_validation", *PLACES, "phase_told"),
    axes={"setting": SETTINGS, "model": MODELS, "tasks": TASKS},
    fill=fill,
    start=Learner,
    figures=draw,
    tables=tabulate,
    main={"setting": ("chain",), "tasks": (None,)},
)
