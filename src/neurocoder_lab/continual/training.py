"""A stream of tasks as a task of the run engine: it resumes inside of any task, with the method's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder_lab.continual.methods import Method
from neurocoder_lab.continual.metrics import accuracies, summary
from neurocoder_lab.continual.stream import MultiHead, Scenario, Stream, split
from neurocoder_lab.data import Examples
from neurocoder_lab.errors import LabError
from neurocoder_lab.task import Config, Task

METRICS = ("steps", "parameters", "accuracy", "learned", "forgetting", "backward_transfer", "forward_transfer")


@dataclass(frozen=True)
class StreamConfig(Config):
    """Settings that every stream has."""

    penalty: float | None = None
    """Strength of the method's penalty itself, for tuning."""
    epochs: int | None = None
    """Passes over each task."""
    examples: int | None = None
    """Training examples of all tasks; all of them by default."""
    measure: Literal["test", "validation"] = "test"
    """validation: measure on every tenth training example, and do not train on those."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("epochs", "examples")
        if self.penalty is not None and not 0 <= self.penalty < inf:
            raise LabError(f"penalty must be a number that is not negative, got {self.penalty}")

    def stream(
        self,
        data: Examples,
        classes: list[list[int]],
        scenario: Scenario,
        prepare: Callable[[Tensor], Tensor],
    ) -> Stream:
        """The tasks, with what to train on and what to measure on, each made ready before it is parted."""
        (x, y), (held_x, held_y) = data.parts(self.measure)
        train = prepare(x[: self.examples]), y[: self.examples]
        try:
            return split(train, (prepare(held_x), held_y), classes, scenario)
        except ValueError as error:
            raise LabError(f"{error}: --examples {self.examples} are too few") from None


def check_form(config: Any, model: str, recoded: bool) -> None:
    """Raise unless `sharpness` and `orthogonal` of a config fit a model that is re-coded as a Neurocoder, or is not."""
    for name in ("sharpness", "orthogonal"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < inf:
            raise LabError(f"{name} must be a number that is not negative, got {value}")
        if value and not recoded:
            raise LabError(f"{model} has no {name}")
    if config.sharpness == 0 and recoded:
        raise LabError("sharpness must be positive, got 0")


def orthogonal(model: nn.Module, strength: float) -> Callable[[int], Tensor]:
    """The orthogonal loss of what the forward of a task uses: heads of other tasks are left alone."""

    def loss(task: int) -> Tensor:
        parts = [model.body, model.heads[task]] if isinstance(model, MultiHead) else [model]
        return strength * torch.stack([nc.orthogonality(part) for part in parts]).sum()

    return loss


class Learner(Task):
    """Learns a stream, task after task; after each it is measured on all of them.

    Args:
        epochs: passes over each task's training data.
        batch: rows a step; the last of an epoch may have fewer.
        extra: from a task to a loss that is added to that of its every batch, such as an orthogonal loss.
        weight: from a task to the factor of `extra` in training; the Fisher counts it once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        stream: Stream,
        method: Method,
        epochs: int,
        batch: int,
        extra: Callable[[int], Tensor] | None = None,
        weight: Callable[[int], float] = lambda task: 1.0,
    ):
        self.stream, self.method, self.batch, self.extra, self.weight = stream, method, batch, extra, weight
        self.epoch_steps = [-(-len(y) // batch) for _, y in stream.train]
        self.ends = [*accumulate(steps * epochs for steps in self.epoch_steps)]
        super().__init__(model, optimiser, self.ends[-1], evaluate_every=max(self.ends[-1] // 50, 1))
        self.order = torch.zeros(0, dtype=torch.long)
        self.matrix = torch.zeros(len(stream) + 1, len(stream))
        self.learned = 0

    def attach(self, accelerator: Accelerator) -> None:
        # other tasks' heads have no gradient
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)  # pyright: ignore
        super().attach(accelerator)
        self.method.load_state(self.method.state())  # on the device to which the parameters have moved

    def due(self, step: int) -> bool:
        return step in self.ends

    def step(self, index: int) -> dict[str, Tensor]:
        if index == 0:
            self.matrix[0] = accuracies(self.stream, self.model, 0)
        task = sum(index >= end for end in self.ends)
        self.learned = task + 1
        (x, y), steps = self.stream.train[task], self.epoch_steps[task]
        place = (index - (self.ends[task - 1] if task else 0)) % steps
        if place == 0:
            self.order = torch.randperm(len(y))
        rows, processes = self.order[place * self.batch : (place + 1) * self.batch], self.accelerator.num_processes
        rows = rows[: len(rows) - len(rows) % processes] if len(rows) >= processes else self.order[-processes:]
        x, y = self.share(x[rows], y[rows])
        loss = F.cross_entropy(self.stream.logits(self.network, x, task), y)
        self.optimiser.zero_grad()
        whole = loss if self.extra is None else loss + self.weight(task) * self.extra(task)
        self.accelerator.backward(whole)
        self.accelerator.unscale_gradients(self.optimiser)
        self.update(task)
        if index + 1 == self.ends[task] and task + 1 < len(self.stream):
            self._finish(task)
        return {"loss": loss}

    def update(self, task: int) -> None:
        """The optimiser's step, with the method's part in it."""
        self.method.step(self.optimiser)

    def _finish(self, task: int) -> None:
        x, y = (tensor.to(self.accelerator.device) for tensor in self.stream.train[task])
        extra = None if self.extra is None else partial(self.extra, task)
        self.method.finish(lambda x: self.stream.logits(self.model, x, task), x, y, extra)

    def evaluate(self) -> dict[str, float]:
        """Accuracy of each task, and their average over the tasks learned so far."""
        learned = self.learned
        row = self.matrix[learned] = accuracies(self.stream, self.model, learned)
        return {"accuracy": row[:learned].mean().item()} | {f"task_{i}": a.item() for i, a in enumerate(row, 1)}

    def conclude(self) -> dict[str, Any]:
        return summary(self.matrix) | {"matrix": [[round(a, 2) for a in row] for row in self.matrix.tolist()]}

    def state(self) -> dict[str, Tensor]:
        return {"order": self.order, "matrix": self.matrix} | {f"method.{n}": t for n, t in self.method.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.order, self.matrix = state["order"], state["matrix"]
        held = {name.removeprefix("method."): t for name, t in state.items() if name.startswith("method.")}
        try:
            self.method.load_state(held)
        except ValueError as error:
            raise LabError(f"the checkpoint cannot be used, remove the run's folder to start again: {error}") from None
