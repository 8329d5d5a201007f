"""Split MNIST (Tables 3 and 4 of Neurocoder): five two-way tasks, one after the other, six methods, three scenarios.

    neurocoder run split-mnist --model neurocoder --method oewc --scenario domain
    neurocoder sweep split-mnist --seeds 10

The Neurocoder comes in two forms: `neurocoder`, with our initialisation and a sharpness and a weight of the orthogonal
loss chosen on held-out data, and `neurocoder-authors`, with all the choices of the authors' published code.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any, Literal

import torch
from torch import nn

import neurocoder as nc
from neurocoder_lab import data, figures
from neurocoder_lab.claims import published
from neurocoder_lab.continual import make
from neurocoder_lab.continual.digits import BATCH, BENCHMARK, EPOCHS, EXAMPLES, TASKS, network, prepare
from neurocoder_lab.continual.methods import TITLES
from neurocoder_lab.continual.methods import Name as Method
from neurocoder_lab.continual.stream import SCENARIOS, Scenario
from neurocoder_lab.continual.training import METRICS, Learner, StreamConfig, check_form, orthogonal
from neurocoder_lab.results import Runs, deviation, spread
from neurocoder_lab.store import LabError
from neurocoder_lab.task import Experiment, Grid
from neurocoder_lab.tuning import best

Model = Literal["mlp", "nsm", "neurocoder", "neurocoder-authors"]
Form = Literal["neurocoder", "neurocoder-authors"]
MODELS: tuple[Model, ...] = Model.__args__
FORMS: tuple[Form, ...] = Form.__args__
METHODS: tuple[Method, ...] = Method.__args__
NAMES = {"mlp": "MLP", "nsm": "NSM", "neurocoder": "Neurocoder", "neurocoder-authors": "Neurocoder, authors' choices"}

LAYERS: dict[str, dict[str, Any]] = {
    "nsm": {"layer": nc.peers.StoredProgramMemory, "programs": 5, "key_dim": 5},
    # the paper's least_used = 5 does nothing in a single step
    "neurocoder": {"slots": 50, "heads": 10, "key_dim": 5},
    "neurocoder-authors": {"slots": 50, "heads": 10, "key_dim": 5, "compat": "authors"},
}
PAPER = {"sharpness": 1.0, "orthogonal": 10.0}
AUTHORS = {"sharpness": 1 / 5, "orthogonal": 1.0}  # their code's: 1/K, and a = 1
# of the orthogonal loss in their code, in the first task and in later ones: a penalty, once there is one, brings it
# along a second time, and SI has a step of its own that does without the first
AUTHORS_WEIGHTS = {"l2": (1, 2), "ewc": (1, 2), "oewc": (1, 2), "si": (0, 1)}
SHARPNESS = (1 / 5, 1.0, 3.0)
ORTHOGONAL = (1.0, 10.0)
# what is tried for --strength tuned, the same for every model
GRID: dict[str, tuple[float, ...]] = {
    "l2": (0.01, 0.1, 1.0, 10.0, 100.0),
    "si": (30.0, 300.0, 3000.0, 30_000.0, 300_000.0),
    "ewc": (10.0, 100.0, 1000.0, 10_000.0, 100_000.0),
    "oewc": (10.0, 100.0, 1000.0, 10_000.0, 100_000.0),
}
# what the authors' published runs logged, 400 hidden units
LOGS: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("domain", "adam"): {"mlp": (53.38, 1.39), "neurocoder": (57.07, 0.45)},
    ("domain", "adagrad"): {"mlp": (56.16, 1.79), "neurocoder": (60.60, 0.49)},
    ("domain", "ewc"): {"mlp": (56.88, 2.18), "neurocoder": (62.56, 1.07)},
    ("domain", "oewc"): {"mlp": (59.64, 3.13), "neurocoder": (71.79, 2.04)},
    ("domain", "l2"): {"mlp": (63.27, 3.94)},
}


@dataclass(frozen=True)
class SplitMnist(StreamConfig):
    """Five two-way digit tasks, one after the other."""

    model: Model = "neurocoder"
    """mlp: plain layers; nsm, neurocoder, neurocoder-authors: every layer re-coded."""
    method: Method = "adam"
    """Plain training with Adam or Adagrad, or with Adam and a penalty: L2, SI, EWC, online EWC."""
    scenario: Scenario = "domain"
    """task: told which task, a head each; domain: not told, two outputs; class: not told, ten outputs."""
    hidden: Literal[256, 400] = 256
    """Width of the hidden layers: 256 as in the paper's table of sizes, 400 as in the authors' logs."""
    strength: Literal["benchmark", "tuned"] = "benchmark"
    """Strength of the penalty: as in the benchmark, or as tuned on held-out data for each model (256 hidden units)."""
    sharpness: float | None = None
    """Of the Neurocoder's attention; by default as chosen on held-out data, or the authors'."""
    orthogonal: float | None = None
    """Weight of the Neurocoder's orthogonal loss (a in the paper); by default as chosen, or the authors'."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_form(self, self.model in FORMS)
        if self.method not in GRID and (self.penalty or self.strength == "tuned"):
            raise LabError(f"{self.method} has no penalty to tune: --method {' '.join(GRID)} have")
        if self.strength == "tuned" and self.hidden != 256:
            raise LabError("penalties are tuned for 256 hidden units: with others, neurocoder run takes --penalty")


def fill(config: SplitMnist) -> dict[str, Any]:
    penalty: float | None = 0.0
    if config.method in GRID and config.strength == "tuned":
        penalty = best("split-mnist", "penalty", scenario=config.scenario, model=config.model, method=config.method)
    elif config.method in GRID:
        penalty = BENCHMARK.get(config.scenario, {}).get(config.method)
    form = {"neurocoder": PAPER, "neurocoder-authors": AUTHORS}.get(config.model, dict.fromkeys(PAPER, 0.0))
    if config.model == "neurocoder":
        scenario = "domain" if config.scenario == "class" else config.scenario  # both have one head
        form = {name: best("split-mnist", name, scenario=scenario) or value for name, value in PAPER.items()}
    return {"epochs": EPOCHS[config.budget], "examples": EXAMPLES[config.budget], "penalty": penalty} | form


def build(model: Model, scenario: Scenario, hidden: int, sharpness: float = 0.0) -> nn.Module:
    plain = network(scenario, hidden)
    if model in LAYERS:
        nc.recode(plain, "*", **LAYERS[model] | ({"sharpness": sharpness} if sharpness else {}))
    return plain


def start(config: SplitMnist) -> Learner:
    if config.penalty is None and config.strength == "tuned":
        raise LabError("this is not tuned yet: neurocoder tune split-mnist")
    if config.penalty is None:
        raise LabError("the benchmark's strengths are for the task and domain scenarios: use --strength tuned")
    digits = data.images("mnist")
    stream = config.stream(digits, TASKS, config.scenario, prepare)
    model = build(config.model, config.scenario, config.hidden, config.sharpness)
    if config.method == "adagrad":
        optimiser: torch.optim.Optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    else:
        optimiser = torch.optim.Adam(model.parameters(), lr=0.001, fused=True)
    method = make(config.method, model, config.penalty if config.method in GRID else None)
    extra = orthogonal(model, config.orthogonal) if config.orthogonal else None
    weights = AUTHORS_WEIGHTS.get(config.method, (1, 1)) if config.model == "neurocoder-authors" else (1, 1)
    learner = Learner(
        model, optimiser, stream, method, config.epochs, BATCH, extra, weight=lambda task: weights[task > 0]
    )
    learner.fingerprint = digits.fingerprint
    return learner


def paper(scenario: str, method: str) -> dict[str, tuple[float, float]]:
    """The paper's mean and standard deviation of each model; the class scenario is not in it."""
    for claim in published():
        if claim["id"] == f"nc-split-mnist-{scenario}-{method}":
            found = {
                model: (claim["paper"][model], claim["paper"]["std"][model]) for model in ("mlp", "nsm", *FORMS[:1])
            }
            return found | dict.fromkeys(FORMS, found["neurocoder"])
    return {}


def logs(scenario: str, method: str) -> dict[str, tuple[float, float]]:
    """What the authors logged of each model."""
    found = LOGS.get((scenario, method), {})
    return found | (dict.fromkeys(FORMS, found["neurocoder"]) if "neurocoder" in found else {})


def tabulate(runs: Runs) -> list[tuple[str, list[str], list[list[str]]]]:
    """Final average accuracy of every method and model, ours beside the paper's or the authors' logs."""
    found = []
    for hidden, scenario, strength in product((256, 400), SCENARIOS, ("benchmark", "tuned")):
        here = runs.where(hidden=hidden, scenario=scenario)
        mine = here.where(strength=strength)
        if strength == "tuned" and mine:  # plain training has nothing to tune
            mine = Runs([*mine, *(run for run in here if run["config"]["method"] not in GRID)])
        models = [model for model in MODELS if mine.where(model=model)]
        beside = ["paper" if hidden == 256 else "authors' logs"] if scenario != "class" and strength != "tuned" else []
        header = ["method", *(name for model in models for name in (NAMES[model], *beside))]
        rows = []
        for method in METHODS:
            theirs = paper(scenario, method) if hidden == 256 else logs(scenario, method)
            row = [TITLES[method]]
            for model in models:
                ran = mine.where(method=method, model=model)
                chosen = f", λ = {ran[0]['config']['penalty']:g}" if ran.where(strength="tuned") else ""
                row.append(spread(ran.values("accuracy")) + chosen)
                if beside:
                    row.append("{:.2f} ± {:.2f}".format(*theirs[model]) if model in theirs else "-")
            rows += [row] if mine.where(method=method) else []
        if rows:
            title = f"Split MNIST, {scenario} scenario, {hidden} hidden units, {strength} penalties: accuracy in %"
            found.append((title, header, rows))
    return found


def draw(runs: Runs) -> list[tuple[str, str]]:
    """Tables 3 and 4 as pictures."""
    found = []
    for scenario in ("task", "domain"):
        mine = runs.where(hidden=256, scenario=scenario, strength="benchmark")
        ours: dict[str, list[tuple[float, float] | None]] = {NAMES[model]: [] for model in MODELS}
        theirs: dict[str, list[tuple[float, float] | None]] = {NAMES[model]: [] for model in MODELS}
        for model, method in product(MODELS, METHODS):
            values = mine.where(model=model, method=method).values("accuracy")
            ours[NAMES[model]].append((mean(values), deviation(values)) if values else None)
            theirs[NAMES[model]].append(paper(scenario, method)[model])
        if mine:
            table = "Table 3" if scenario == "task" else "Table 4"
            title = f"{table}, {scenario} scenario: final accuracy, mean ± std over seeds; hollow: the paper's"
            found.append((title, figures.dots(ours, theirs, [*TITLES.values()], "accuracy, %")))
    return found


EXPERIMENT = Experiment(
    name="split-mnist",
    reproduces="Neurocoder, Tables 3 and 4",
    summary="five two-way digit tasks one after the other: MLP, NSM, Neurocoder with six methods against forgetting",
    config=SplitMnist,
    metrics=METRICS,
    axes={
        "model": MODELS,
        "method": METHODS,
        "scenario": SCENARIOS,
        "hidden": (256, 400),
        "strength": ("benchmark", "tuned"),
    },
    fill=fill,
    start=start,
    figures=draw,
    tables=tabulate,
    grids=[
        Grid(
            {"scenario": ("task", "domain")},
            lambda place: {"sharpness": SHARPNESS, "orthogonal": ORTHOGONAL},
            {"measure": "validation", "model": "neurocoder"},
            "accuracy",
            across={"method": ("adam", "oewc")},
        ),
        Grid(  # the form by which the claims are judged
            {"scenario": ("task", "domain")},
            lambda place: {"model": FORMS},
            {"measure": "validation"},
            "accuracy",
            across={"method": ("adam", "oewc")},
        ),
        Grid(
            {"scenario": ("task", "domain"), "model": MODELS, "method": tuple(GRID)},
            lambda place: {"penalty": GRID[place["method"]]},
            {"measure": "validation"},
            "accuracy",
        ),
    ],
    main={"scenario": ("task", "domain"), "hidden": (256,), "strength": ("benchmark",)},
)
