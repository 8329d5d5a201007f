"""Streams of classification tasks in three scenarios, made from any labelled data.

task: every task has classes and outputs of its own, and the network is told which task it sees, `network(x, task)`;
domain: all tasks share the same few outputs, and nobody says which task it is;
class: one output for every class met so far, to be told apart across tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor, nn

Scenario = Literal["task", "domain", "class"]
SCENARIOS: tuple[Scenario, ...] = ("task", "domain", "class")
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Stream:
    """Tasks in the order in which they are learned.

    Attributes:
        scenario: task, domain or class.
        train, test: x and y of every task. Labels count from 0: within the task (task, domain) or over all (class).
        classes: how many classes each task has.
    """

    scenario: Scenario
    train: tuple[Labelled, ...]
    test: tuple[Labelled, ...]
    classes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.scenario not in SCENARIOS:
            raise ValueError(f"scenario must be one of {', '.join(SCENARIOS)}, got {self.scenario!r}")
        if not all(isinstance(count, Integral) for count in self.classes):
            raise TypeError(f"classes of a Stream are how many each task has, such as (2, 2); got {self.classes}")
        if not len(self.train) == len(self.test) == len(self.classes) > 0:
            counts = f"{len(self.train)}, {len(self.test)} and {len(self.classes)}"
            raise ValueError(f"train, test and classes must speak of the same tasks, got {counts} of them")
        for name, parts in (("train", self.train), ("test", self.test)):
            checked = tuple(_checked(part, f"{name}[{task}]") for task, part in enumerate(parts))
            object.__setattr__(self, name, checked)
            for task, (_, y) in enumerate(checked):
                first, last = self._labels(task)
                if y.min() < first or y.max() > last:
                    raise ValueError(f"{name}[{task}] has labels outside of {first} .. {last}: see `Stream.train`")

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def outputs(self) -> int | tuple[int, ...]:
        """What the network must have: so many outputs, or a head of so many for each task."""
        if self.scenario == "task":
            return self.classes
        return sum(self.classes) if self.scenario == "class" else max(self.classes)

    def logits(self, network: Callable[..., Tensor], x: Tensor, task: int, learned: int | None = None) -> Tensor:
        """What the network says of inputs of a task, after so many were `learned` (up to this one by default)."""
        learned = task + 1 if learned is None else learned
        if not 0 <= task < len(self) or not 0 <= learned <= len(self):
            raise ValueError(f"there are tasks 0 .. {len(self) - 1}, got task {task}, {learned} learned")
        try:
            y = network(x, task) if self.scenario == "task" else network(x)
        except TypeError as error:
            how = "network(x, task), as MultiHead" if self.scenario == "task" else "network(x)"
            raise TypeError(f"in the {self.scenario} scenario the network is called {how}: {error}") from error
        width = self.classes[task] if self.scenario == "task" else self.outputs
        if y.shape != (len(x), width):
            raise ValueError(f"the network must give {width} outputs a row, got {tuple(y.shape)} for {len(x)} rows")
        return y[:, : sum(self.classes[: max(learned, 1)])] if self.scenario == "class" else y

    def _labels(self, task: int) -> tuple[int, int]:
        first = sum(self.classes[:task]) if self.scenario == "class" else 0
        return first, first + self.classes[task] - 1


def _checked(data: Labelled, name: str) -> Labelled:
    """Inputs and labels that fit each other; arrays become tensors, whole labels of any kind long ones."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(f"{name} must be a pair of inputs and labels, got a {type(data).__name__}")
    x, y = map(torch.as_tensor, data)
    if y.dim() != 1 or y.is_floating_point() or y.is_complex():
        raise ValueError(f"{name} needs whole labels of shape (N,), got {tuple(y.shape)} of {y.dtype}")
    if len(x) != len(y) or not len(y):
        raise ValueError(f"{name} has {len(x)} inputs and {len(y)} labels")
    return x, y.long()


def split(train: Labelled, test: Labelled, classes: Sequence[Sequence[int]], scenario: Scenario) -> Stream:
    """Cut labelled data into tasks by class, say [[0, 1], [2, 3]]; examples of other classes are left out."""
    train, test = _checked(train, "train"), _checked(test, "test")
    try:
        classes = [[int(label) for label in group] for group in classes]
    except TypeError:
        raise TypeError(f"classes must be lists of labels, such as [[0, 1], [2, 3]]; got {classes}") from None
    flat = [label for group in classes for label in group]
    if len({*flat}) < len(flat) or not flat or not all(classes):
        raise ValueError(f"every task needs classes, and no class may stand twice: got {classes}")
    for name, (_, y) in (("training", train), ("test", test)):
        missing = sorted(set(flat) - set(y.tolist()))
        if missing:
            raise ValueError(f"the {name} data has no example of class {missing[0]}")

    def tasks(data: Labelled) -> tuple[Labelled, ...]:
        x, y = data
        parts, before = [], 0
        for group in classes:
            same = y[:, None] == torch.tensor(group, device=y.device)
            rows = same.any(1)
            parts.append((x[rows], same[rows].long().argmax(1) + (before if scenario == "class" else 0)))
            before += len(group)
        return tuple(parts)

    return Stream(scenario, tasks(train), tasks(test), tuple(map(len, classes)))


class MultiHead(nn.Module):
    """A body and a head for each task; `network(x, task)` computes that of one task only."""

    def __init__(self, body: nn.Module, heads: Sequence[nn.Module]):
        super().__init__()
        if len({*map(id, heads)}) < len(heads):
            raise ValueError("every task needs a head of its own, and one stands twice")
        self.body, self.heads = body, nn.ModuleList(heads)

    def forward(self, x: Tensor, task: int) -> Tensor:
        if not 0 <= task < len(self.heads):
            raise ValueError(f"there are heads for tasks 0 .. {len(self.heads) - 1}, got task {task}")
        return self.heads[task](self.body(x))
