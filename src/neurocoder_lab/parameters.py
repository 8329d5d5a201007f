"""Parameters of the papers' models, ours beside Table 7 of Neurocoder: `python -m neurocoder_lab.parameters [RESULTS]`.

Given a folder of results, it writes parameters.json there, which decides the claim about sizes: every cell that can be
built counts, whatever the papers leave open in it (the notes say what).

Every model is the plain network re-coded with the settings of the papers' Table 6. No width is fitted to a number but
those of the Turing machine's controllers, which the paper does not give: they are the experiment's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import neurocoder as nc
from neurocoder_lab import networks, results
from neurocoder_lab.continual import digits
from neurocoder_lab.errors import guarded
from neurocoder_lab.experiments import algorithms, cifar, split_cifar
from neurocoder_lab.provenance import source
from neurocoder_lab.rules.neurocoder import TOLERANCE
from neurocoder_lab.store import make_folder
from neurocoder_lab.turing import TuringMachine

AUTHORS: dict[str, Any] = {"compat": "authors"}
CIFAR, MOE, NSM = (cifar.PEERS[name] for name in ("neurocoder", "moe", "nsm"))


@dataclass(frozen=True)
class Cell:
    """One number of Table 7.

    Attributes:
        task, model: its row and column.
        paper: the number printed there.
        build: the plain networks; several (CIFAR-10 and -100) are averaged, as in the table.
        where: the layers to re-code, with `options`; None: the plain network.
        note: the arithmetic, and what the papers leave open.
    """

    task: str
    model: str
    paper: float
    build: tuple[Callable[[], nn.Module], ...]
    where: Any = None
    options: dict[str, Any] | None = None
    note: str = ""

    def count(self) -> float:
        counts = []
        for build in self.build:
            with torch.device("meta"):
                model = build()
                if self.where is not None:
                    nc.recode(model, self.where, **(self.options or {}))
            counts.append(sum(parameter.numel() for parameter in model.parameters()))
        return sum(counts) / len(counts)


def _gru(hidden: int) -> tuple[Callable[[], nn.Module]]:
    return (lambda: networks.Recurrent(2, hidden),)


def _ntm(model: algorithms.Model) -> tuple[Callable[[], nn.Module]]:
    """The plain machine with the controller that it has beside this interface."""
    return (lambda: TuringMachine(algorithms.WIDTH, algorithms.BITS, algorithms.HIDDEN[model]),)


def _both(make: Callable[[int], nn.Module]) -> tuple[Callable[[], nn.Module], ...]:
    return (lambda: make(10), lambda: make(100))


def cells() -> list[Cell]:
    mlp = _both(lambda classes: networks.mlp(3072, 512, 256, classes))
    lenet, densenet = _both(networks.lenet), _both(networks.densenet)
    atari = (lambda: networks.ActorCritic(networks.wide_torso(frames=1), 1024, actions=18),)
    interface = algorithms.INTERFACES
    split = (lambda: networks.mlp(1024, 256, 256, 2),)
    resnet = _both(lambda classes: nn.Sequential(networks.resnet18(), networks.mlp(1000, 512, 256, classes)))
    every, last = "*", lambda name, module: isinstance(module, nn.Linear) and module.out_features in (10, 100)
    polynomial = {"heads": 15, "slots": 10, "key_dim": 3} | AUTHORS
    several = {"steps": 5, "slots": 20, "key_dim": 3, "least_used": 2} | AUTHORS
    heads = ["policy", "value"]
    return [
        Cell("MNIST linear", "original", 7800, (lambda: nn.Sequential(nn.Linear(784, 10)),), note="784 x 10 + 10"),
        Cell("MNIST linear", "Neurocoder", 7300, (lambda: nn.Sequential(nn.Linear(200, 10)),), every,
             {"slots": 5, "steps": 5, "key_dim": 2, "least_used": 2, "rules": nc.Rules(gate="state")},
             "on a projection to 200; LSTM of 3HK + 1 = 7 units, gates from its state"),
        Cell("CIFAR MLP", "original", 1.7e6, mlp, note="3072-512-256-classes"),
        Cell("CIFAR MLP", "MoE", 15.4e6, mlp, every, MOE, "10 x 1,718,839 + 2 x 10 gates of 3,840 inputs"),
        Cell("CIFAR MLP", "NSM", 21.2e6, mlp, every, NSM, "10 x 1,718,839 + queries 11 x 3,843 + keys 300"),
        Cell("CIFAR MLP", "Neurocoder", 1.9e6, mlp, every, CIFAR, "all layers, residual; LSTM 6, fitted, with gates"),
        Cell("CIFAR LeNet", "original", 2.1e6, lenet, note="64, 128 channels of 5 x 5, then 512, 256: widths are ours"),
        Cell("CIFAR LeNet", "MoE", 12.3e6, lenet, last, MOE, "output layer only: + 9 x 14,135 + 2 x 10 gates of 256"),
        Cell("CIFAR LeNet", "NSM", 27.1e6, lenet, last, NSM, "output layer only: + 9 x 14,135 + 11 x 257 + 100"),
        Cell("CIFAR LeNet", "Neurocoder", 2.3e6, lenet, last, CIFAR, "output layer, with residual; LSTM 6"),
        Cell("CIFAR DenseNet", "original", 7.0e6, densenet, note="100 layers, growth 12, no bottleneck"),
        Cell("CIFAR DenseNet", "MoE", 20.5e6, densenet, last, MOE, "output layer only: + 9 copies of it, and gates"),
        Cell("CIFAR DenseNet", "NSM", 16.7e6, densenet, last, NSM, "output layer only: + 9 copies, queries, keys"),
        Cell("CIFAR DenseNet", "Neurocoder", 7.3e6, densenet, last, CIFAR, "output layer, with residual; LSTM 6"),
        Cell("polynomial GRU", "original", 3400, _gru(32), note="hidden 32"),
        Cell("polynomial GRU", "HyperNet", 3500, _gru(28), "head", {"layer": nc.peers.HyperLinear},
             "hidden 28; 28 scales, one layer"),
        Cell("polynomial GRU", "FiLM", 3600, _gru(32), "head", {"layer": nc.peers.FiLM},
             "hidden 32; scale and shift, one layer"),
        Cell("polynomial GRU", "Neurocoder single", 3600, _gru(16), "head", polynomial, "hidden 16"),
        Cell("polynomial GRU", "Neurocoder multi", 2100, _gru(8), "head", several, "hidden 8"),
        Cell("Atari LSTM", "original", 3.2e6, atari,
             note="1,024 features of one frame into an LSTM of 512 (of four frames: 2,400 more)"),
        Cell("Atari LSTM", "HyperNet", 3.6e6, atari, heads, {"layer": nc.peers.HyperLinear},
             "512 scales for each of policy and value, one layer"),
        Cell("Atari LSTM", "Neurocoder", 3.3e6, atari, heads,
             {"slots": 80, "heads": 15, "key_dim": 3, "residual": True} | AUTHORS, "policy and value, with residual"),
        Cell("algorithms NTM", "original", 308e3, _ntm("ntm"), note="LSTM 250, memory 128 x 20 (an LSTM of 200: 209K)"),
        Cell("algorithms NTM", "NSM", 264e3, _ntm("nsm"), "interface", interface["nsm"],
             "LSTM 154, fitted; interface layer"),
        Cell("algorithms NTM", "FiLM", 254e3, _ntm("film"), "interface", interface["film"],
             "LSTM 204, fitted; interface layer"),
        Cell("algorithms NTM", "Neurocoder", 255e3, _ntm("neurocoder"), "interface",
             interface["neurocoder"] | AUTHORS, "LSTM 210, fitted; interface layer, with residual"),
        Cell("Split MNIST MLP", "original", 328e3, split, note="1024-256-256-2"),
        Cell("Split MNIST MLP", "NSM", 2.3e6, split, every, NSM | {"programs": 5, "key_dim": 5},
             "5 programs: 5 x 328,706 + queries 6 x 1,539 + keys 75; the authors' 2,295,920 count unused networks"),
        Cell("Split MNIST MLP", "Neurocoder", 348e3, split, every,
             digits.NEUROCODER | AUTHORS, "all layers"),
        Cell("Split CIFAR ResNet", "original", 12.6e6, resnet,
             note="ResNet-18 of 1000 outputs, then 512-256-classes: widths are ours"),
        Cell("Split CIFAR ResNet", "Neurocoder", 12.6e6, resnet, "1.*",
             split_cifar.LAYERS | AUTHORS, "the three layers of the head"),
    ]  # fmt: skip


def main(folder: Path | None = None) -> int:
    if folder is not None:
        make_folder(folder)  # before all the counting
    table = Table("task", "model", "ours", "paper", "off by", "of which", title="Parameters beside Table 7")
    for column in table.columns[2:5]:
        column.justify = "right"
    runs = []
    for cell in cells():
        count = cell.count()
        away = count / cell.paper - 1
        mark = "ok" if abs(away) <= TOLERANCE else "!"
        table.add_row(cell.task, cell.model, f"{count:,.0f}", f"{cell.paper:,.0f}", f"{away:+.1%} {mark}", cell.note)
        config = {"task": cell.task, "model": cell.model, "seed": 0, "budget": "paper"}
        final = {"parameters": count, "paper": cell.paper, "away": away}
        about = {"environment": source(), "command": "python -m neurocoder_lab.parameters results"}
        runs.append({"config": config, "final": final, "curve": {}, "seconds": 0.0, **about})
    Console().print(table)
    if folder is not None:
        results.replace(folder, "parameters", runs)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(*map(Path, sys.argv[1:2]))))
