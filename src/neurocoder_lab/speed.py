"""Speed and size of whole networks: a training step of every variant over the plain network's.

    neurocoder bench networks [--networks mlp lenet] [--repeats 31] [--seeds 3] [--out results/speed.json]

One thread. A step is forward, backward with what the layers want added, and Adam, on a batch as in training. A round
times a step of every variant, one after the other; a ratio is the median of a variant's times over the median of the
plain network's in the same rounds. Every seed draws weights, inputs and the order of each round anew. DenseNet, of 100
layers, has a third of the rounds, and batches of 32, as in the paper's appendix: 128 would keep 15 GB for the backward
pass; densenet-output is its output layer alone, all that differs between its variants. MoE sends a row to 1 of 10
experts, the cheaper of the two that `cifar` tries. Of penn-treebank
the plain network is the fixed module, and a step an iteration: with EM, a fifteenth of an E-step more. The Turing
machine learns as in its experiment, sequences of two tasks, by RMSProp; the time steps a second are told, too.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal, get_args

import rich.table
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.modular.training import ViterbiEM
from neurocoder_lab import results
from neurocoder_lab.bench import interleave
from neurocoder_lab.chains import chains, lengths
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments import algorithms, cifar, penn_treebank, polynomial
from neurocoder_lab.modules import BETWEEN, Lesson
from neurocoder_lab.provenance import processor, source
from neurocoder_lab.results import Runs
from neurocoder_lab.rules import rules
from neurocoder_lab.task import Table
from neurocoder_lab.turing import TuringMachine

Name = Literal["mlp", "lenet", "densenet", "densenet-output", "polynomial-gru", "ntm", "penn-treebank"]
NETWORKS: tuple[Name, ...] = get_args(Name)
LIGHT: dict[str, dict[str, Any]] = {
    "hypernet": {"layer": nc.peers.HyperLinear},
    "film": {"layer": nc.peers.FiLM},
    "recommended-no-residual": {  # as nc.recode chooses where there is room, less the residual program
        "slots": 16, "heads": 8, "controller_sees": "read", "rules": nc.Rules(free_keys=nc.functional.BANKS),
    },
}  # fmt: skip
GRU: dict[str, polynomial.Model] = {
    "original": "linear",
    "hypernet": "hypernet",
    "film": "film",
    "neurocoder": "neurocoder-multi",
}
NTM: dict[str, algorithms.Model] = {model: model for model in algorithms.MODELS if model != "ntm"}
TREEBANK: dict[str, penn_treebank.Row] = {
    "original": ("fixed", 1, 1),
    "fixed-3": ("fixed", 3, 3),
    "em-1-of-15": ("em", 15, 1),
    "em-3-of-15": ("em", 15, 3),
    "reinforce-1-of-15": ("reinforce", 15, 1),
    "topk-1-of-15": ("topk", 15, 1),
}
WORDS = 10_000
DEPTH, FEATURES = 100, 1168  # of the DenseNet, and what its output layer gets


def variants(network: Name) -> Mapping[str, Callable[[], nn.Module]]:
    """What makes each, the plain network first."""
    if network == "polynomial-gru":
        return {name: partial(polynomial.build, model) for name, model in GRU.items()}
    if network == "ntm":
        return {name: partial(algorithms.build, model) for name, model in ({"original": "ntm"} | NTM).items()}
    if network == "penn-treebank":
        return {name: partial(penn_treebank.WordModel, WORDS, *row) for name, row in TREEBANK.items()}
    if network == "densenet-output":
        return {name: partial(_output_of, make) for name, make in variants("densenet").items()}
    models = [model for model in cifar.MODELS if network == "lenet" or not model.endswith("all-dense")]
    made = {model: partial(cifar.build, network, 10, model, depth=DEPTH) for model in models}
    return made | {name: partial(cifar.recoded, network, 10, DEPTH, **options) for name, options in LIGHT.items()}


def _output_of(make: Callable[[], nn.Module]) -> nn.Module:
    return [*make().children()][-1]


def batch(network: Name) -> tuple[Tensor, ...]:
    """Inputs and targets like those of its experiment, and what else it has."""
    if network == "polynomial-gru":
        return polynomial.sequences(polynomial.BATCH, polynomial.CHUNKS, 0.0)
    if network == "ntm":
        return chains(algorithms.BATCH, tasks=2)
    if network == "penn-treebank":
        word, following = torch.randint(WORDS, (2, penn_treebank.BATCH, penn_treebank.STEPS))
        return word, following
    if network == "densenet-output":
        return torch.randn(cifar.BATCH["densenet"], FEATURES), torch.randint(10, (cifar.BATCH["densenet"],))
    rows = cifar.BATCH[network]
    images = torch.randn(rows, 3, 32, 32).contiguous(memory_format=cifar.LAYOUT[network])
    return images, torch.randint(10, (rows,))


def stepper(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    """A function that times one training step."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        start = time.perf_counter()
        said = model(x)
        loss = F.mse_loss(said.squeeze(-1), y) if y.is_floating_point() else F.cross_entropy(said, y)
        optimiser.zero_grad()
        (loss + nc.auxiliary(model)).backward()
        optimiser.step()
        return time.perf_counter() - start

    return step


def answerer(model: TuringMachine, x: Tensor, y: Tensor, phase: Tensor) -> Callable[[], float]:
    """A function that times one training step of a Turing machine."""
    optimiser = algorithms.optimiser(model)

    def step() -> float:
        start = time.perf_counter()
        _, loss = algorithms.objective(model, model(x, lengths(phase)), y, phase)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), algorithms.CLIP)
        optimiser.step()
        return time.perf_counter() - start

    return step


def reader(model: nn.Module, word: Tensor, following: Tensor, method: penn_treebank.Method) -> Callable[[], float]:
    """A function that times one iteration of a word model, with its share of an E-step."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    inputs = word, following, torch.zeros(len(word), penn_treebank.UNITS)
    batch = inputs, following, torch.arange(len(word))
    lesson = None if method == "fixed" else Lesson(method, model, lambda output, _: output[0], len(word))

    def step() -> float:
        start = time.perf_counter()
        loss = -model(*inputs)[0].mean() if lesson is None else lesson.training.loss(*batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        learned = time.perf_counter()
        if lesson is not None and isinstance(lesson.training, ViterbiEM):
            lesson.training.expect(*batch)
        return learned - start + (time.perf_counter() - learned) / BETWEEN

    return step


def compare(network: Name, repeats: int, seed: int) -> dict[str, dict[str, float]]:
    """The numbers of every variant."""
    torch.manual_seed(seed)
    models = {name: make() for name, make in variants(network).items()}
    inputs = batch(network)
    kind = {"penn-treebank": reader, "ntm": answerer}.get(network, stepper)
    more = {name: (TREEBANK[name][0],) if network == "penn-treebank" else () for name in models}
    times = interleave({name: kind(model, *inputs, *more[name]) for name, model in models.items()}, repeats)
    length = inputs[0].shape[1] if inputs[0].dim() == 3 else None  # of sequences
    return {
        name: {
            "step_ratio": times[name] / times["original"],
            "milliseconds": times[name],
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        | ({} if length is None else {"time_steps": 1e3 * length / times[name]})
        for name, model in models.items()
    }


def lacking(runs: Runs) -> list[str]:
    """The networks of which the claims about speed have too few runs."""
    about_speed = [rule for rule in rules().values() if rule.experiment == "speed"]
    few = {
        group.where["network"] for rule in about_speed for group in rule.groups() if len(group.runs(runs)) < rule.fewest
    }
    return [network for network in NETWORKS if network in few]


def tabulate(runs: Runs) -> Table:
    """Every variant of every network that was measured; the ratios, and how far those of the draws lie apart."""
    rows = []
    for network in NETWORKS:
        here = runs.where(network=network)
        for name in dict.fromkeys(run["config"]["model"] for run in here):
            mine = here.where(model=name)
            ratios, times, rates = (mine.values(metric) for metric in ("step_ratio", "milliseconds", "time_steps"))
            span = f"{mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            size, told = f"{mine[0]['final']['parameters']:,}", f"{mean(rates):,.0f}" if rates else "-"
            rows.append([network, name, f"{mean(times):.1f}", span, size, told])
    header = ["network", "variant", "step, ms", "over the plain network", "parameters", "time steps a second"]
    where = sorted({run["environment"].get("processor") or run["environment"]["machine"] for run in runs})
    return f"A training step of whole networks, one thread, {' and '.join(where)}", header, rows


def measure(networks: tuple[Name, ...], repeats: int, seeds: int, out: Path | None) -> None:
    """Print every ratio, and put them beside the results where `out` says: claims are judged by them."""
    if not networks:
        raise LabError(f"--networks names none; there are {', '.join(NETWORKS)}")
    if repeats < 1 or seeds < 1:
        raise LabError(f"repeats and seeds must be at least 1, got --repeats {repeats} --seeds {seeds}")
    if out is not None and out.suffix != ".json":
        raise LabError(f"--out takes a JSON file, such as results/speed.json; got {out}")
    torch.set_num_threads(1)
    about = source() | {"versions": {"torch": torch.__version__}, "python": platform.python_version(),
                        "machine": platform.machine(), "processor": processor(), "threads": 1}  # fmt: skip
    every = Runs()
    for network in networks:
        rounds = max(repeats // 3, 1) if network == "densenet" else repeats
        runs = [
            {
                "config": {"network": network, "model": name, "seed": seed, "budget": "desk"},
                "final": numbers,
                "curve": {},
                "seconds": 0.0,
                "environment": about | {"repeats": rounds},
            }
            for seed in range(seeds)
            for name, numbers in compare(network, rounds, seed).items()
        ]
        every += runs
        if out is not None:
            results.merge(out.parent, out.stem, runs)
    _, header, rows = tabulate(every)
    shown = rich.table.Table(*header)
    for column in shown.columns[2:]:
        column.justify = "right"
    for row in rows:
        shown.add_row(*row)
    Console(width=None if Console().is_terminal else 120).print(shown)
    few = [] if out is None else lacking(results.load(out.parent, out.stem))
    if few:
        print(f"the claims about speed lack measurements of committed code, three seeds: --networks {' '.join(few)}")
