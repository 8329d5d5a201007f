"""The experiments: what each is, for `neurocoder list`, and its one file, imported when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from neurocoder_lab.errors import LabError
from neurocoder_lab.signals import importing

if TYPE_CHECKING:
    from neurocoder_lab.task import Experiment


@dataclass(frozen=True)
class Entry:
    """What an experiment reproduces, and how it goes, in a line."""

    reproduces: str
    summary: str

    def __str__(self) -> str:
        return f"{self.summary[0].upper()}{self.summary[1:]}. Reproduces {self.reproduces}."


CATALOGUE = {
    "polynomial": Entry(
        "Neurocoder, Figs 5 and 6",
        "a GRU predicts sequences whose polynomial changes: seven heads; plain, noisy, twice the polynomials",
    ),
    "mnist-linear": Entry(
        "Neurocoder, Fig 4",
        "digits told apart by one layer: linear, and Neurocoders of equal size with 1 to 10 attention steps",
    ),
    "cifar": Entry(
        "Neurocoder, Table 2 (Table 3 of the later appendix)",
        "MLP, LeNet and DenseNet on small pictures: plain, low-rank, MoE, NSM, and two Neurocoders",
    ),
    "algorithms": Entry(
        "Neurocoder, later appendix, Fig 7",
        "a Neural Turing Machine solves chains of algorithmic tasks: five interfaces; longer tasks, and more of them",
    ),
    "atari": Entry(
        "Neurocoder, Fig 7",
        "actor-critic agents play four Atari games: policy and value plain, of a HyperNet, composed; and at random",
    ),
    "split-mnist": Entry(
        "Neurocoder, Tables 3 and 4",
        "five two-way digit tasks one after the other: MLP, NSM, Neurocoder with six methods against forgetting",
    ),
    "split-cifar": Entry(
        "Neurocoder, Fig 8",
        "image tasks one after the other on a frozen backbone: plain and Neurocoder heads, with and without SI",
    ),
    "toy-regression": Entry(
        "Modular Networks, Fig 3",
        "two clusters with a linear map each, one of two modules a point: EM, REINFORCE, noisy top-k",
    ),
    "penn-treebank": Entry(
        "Modular Networks, Tables 1 and 2, Figs 4 and 5",
        "a modular GRU predicts words: EM, REINFORCE, noisy top-k and fixed modules, K of M",
    ),
    "modular-cifar": Entry(
        "Modular Networks, Figs 2 and 6",
        "small pictures by a network of modular layers: linear and convolutional controllers, and a plain baseline",
    ),
    "forgetting": Entry(
        "ours: why Table 3 of Neurocoder does not come out",
        "Split MNIST, watched: what moves while later tasks are learned, what that costs, and variants that hold it",
    ),
    "large-memory": Entry(
        "ours: large memories of which each head reads a few slots",
        "Split MNIST and CIFAR-10 with fixed addresses and rows that move when read: what is kept, what can be learned",
    ),
}
NAMES = tuple(CATALOGUE)


def get(name: str) -> Experiment:
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1, cutoff=0.0)
        raise LabError(f"no experiment is called {name!r}; did you mean {near[0]}? All: {', '.join(NAMES)}")
    with importing():
        return import_module(f"neurocoder_lab.experiments.{name.replace('-', '_')}").EXPERIMENT


def every() -> list[Experiment]:
    return [get(name) for name in NAMES]
