"""What the experiments of Modular Networks share: one of three trainings, E-steps in between, and its state."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder.modular.training import LogLikelihood, NoisyTopK, Reinforce, Training, ViterbiEM, entropies

Method = Literal["em", "reinforce", "topk"]
METHODS: dict[str, str] = {"em": "EM", "reinforce": "REINFORCE", "topk": "noisy top-k"}
BETWEEN = 15  # gradient steps of a partial M-step
MIXED = 4  # k of noisy top-k
ENOUGH = 5  # E-steps of a data point, at least, where EM is judged: docs/guides/modular.md has the reason
Batch = Callable[[], tuple[Any, Tensor, Tensor]]  # gives inputs, targets, and their places in the data


class Lesson:
    """Trains a modular network step by step.

    Args:
        size: data points, of which EM stores a choice each.
        between: gradient steps between E-steps.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        log_likelihood: LogLikelihood,
        size: int,
        between: int = BETWEEN,
        mixed: int = MIXED,
    ):
        self.size, self.between = size, between
        self.training: Training
        if method == "em":
            self.training = ViterbiEM(model, log_likelihood, size)
        elif method == "reinforce":
            self.training = Reinforce(model, log_likelihood)
        else:
            self.training = NoisyTopK(model, log_likelihood, mixed)

    def loss(self, step: int, batch: Batch, expected: Batch) -> Tensor:
        """The loss of a batch; with EM, where it is time for it, after an E-step on the batch `expected`."""
        if isinstance(self.training, ViterbiEM) and step % self.between == 0:
            self.training.expect(*expected())
        return self.training.loss(*batch())

    def reached(self, steps: int, batch: int) -> dict[str, float]:
        """How many E-steps each data point had on average, after so many steps with batches of one size."""
        em = isinstance(self.training, ViterbiEM)
        return {"e_steps": -(-steps // self.between) * batch / self.size} if em else {}

    @property
    def choices(self) -> Tensor | None:
        """The composition that EM has stored for each data point, (N, T)."""
        return self.training.choices if isinstance(self.training, ViterbiEM) else None

    def state(self) -> dict[str, Tensor]:
        return {f"training.{name}": tensor for name, tensor in self.training.state_dict().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        mine = {name.removeprefix("training."): t for name, t in state.items() if name.startswith("training.")}
        self.training.load_state_dict(mine)


def reached_by_all(count: int, between: int) -> int:
    """So many of the batches of a pass, in order, that an E-step every `between` steps reaches each in turn."""
    return next(number for number in range(count, 0, -1) if gcd(number, between) == 1)


def chosen(seen: nc.Trace) -> dict[str, float]:
    """The two entropies, and how many modules of a layer are most likely for at least a hundredth of its choices."""
    h_a, h_b = entropies(seen)
    used = []
    for name in seen:
        likely = torch.cat([call.probability.argmax(-1).flatten() for call in seen.calls(name)])
        used.append((torch.bincount(likely) >= 0.01 * len(likely)).sum().item())
    return {"h_a": h_a, "h_b": h_b, "modules_used": sum(used) / len(used)}


def numbered(name: str, tensors: list[Tensor]) -> dict[str, Tensor]:
    """A list as part of a task's state."""
    return {f"{name}.{n}": tensor for n, tensor in enumerate(tensors)}


def in_order(name: str, state: dict[str, Tensor]) -> list[Tensor]:
    """That list again."""
    return [state[f"{name}.{n}"] for n in range(sum(key.startswith(f"{name}.") for key in state))]
