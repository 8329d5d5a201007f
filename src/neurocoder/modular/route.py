"""How modular layers choose while they are trained: by lot, along a given path, or mixing the best few.

Shapes: B data points, T choices of one data point in all layers and calls, in the order they are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from neurocoder.walk import conditional_layers


class Route:
    """Decides the choices of one forward of a model, and keeps what was decided.

    Attributes:
        log_prob: log p(a | x) of each data point, (B,), once the model has run (Eq. 2).
    """

    def __init__(self) -> None:
        self.log_prob: Tensor | None = None
        self._chosen: list[Tensor] = []
        self._modules: list[int] = []

    def choose(self, log_p: Tensor) -> tuple[Tensor, Tensor | None]:
        """Modules (B, ..., K, k) and their weights (None: no mixture) for log-probabilities (B, ..., K, M)."""
        raise NotImplementedError

    def finished(self) -> bool:
        """Whether the forward used all there was."""
        return True

    @property
    def choices(self) -> Tensor:
        """All choices, (B, T)."""
        return torch.cat(self._chosen, 1)

    @property
    def modules(self) -> Tensor:
        """How many modules there were to choose from, (T,)."""
        return torch.tensor(self._modules)

    def _note(self, log_p: Tensor, chosen: Tensor) -> None:
        if log_p.dim() < 3 or (self._chosen and len(log_p) != len(self._chosen[0])):
            raise ValueError(
                f"a modular layer chose for inputs of shape {tuple(log_p.shape[:-2])}: training needs the data points "
                "along the first dimension of what every modular layer sees"
            )
        taken = log_p.gather(-1, chosen).flatten(1).sum(1)
        self.log_prob = taken if self.log_prob is None else self.log_prob + taken
        self._chosen.append(chosen.flatten(1))
        self._modules += [log_p.shape[-1]] * self._chosen[-1].shape[1]


def draw(log_p: Tensor) -> Tensor:
    """Modules (..., K, 1) by lot."""
    with torch.no_grad():
        race = log_p - torch.empty_like(log_p).exponential_().log()  # the largest is a draw (Gumbel)
        return race.argmax(-1, keepdim=True)


class Sampled(Route):
    """Every choice drawn from the controller's distribution."""

    def choose(self, log_p: Tensor) -> tuple[Tensor, Tensor | None]:
        chosen = draw(log_p)
        self._note(log_p, chosen)
        return chosen, None


class Given(Route):
    """The choices (B, T) of an earlier forward; with `modules` (T,), how many it had to choose from."""

    def __init__(self, path_BT: Tensor, modules: Tensor | None = None):
        super().__init__()
        self._path, self._next = path_BT, 0
        self._expected = None if modules is None else modules.tolist()

    def choose(self, log_p: Tensor) -> tuple[Tensor, Tensor | None]:
        chosen = self._due(log_p)
        self._note(log_p, chosen)
        return chosen, None

    def _due(self, log_p: Tensor) -> Tensor:
        """The next choices of the path."""
        shape, modules = log_p.shape[:-1], log_p.shape[-1]
        count = shape[1:].numel()
        if len(log_p) != len(self._path):
            raise ValueError(f"a path of {len(self._path)} data points for {len(log_p)} of them")
        due = range(self._next, self._next + count)
        if due.stop > self._path.shape[1] or (self._expected and any(self._expected[t] != modules for t in due)):
            raise ValueError(
                f"this forward makes other choices than the {self._path.shape[1]} that are stored for a data point: "
                "the model, or the length of its input, has changed"
            )
        self._next = due.stop
        return self._path[:, due.start : due.stop].to(log_p.device).reshape(*shape, 1).long()

    def finished(self) -> bool:
        return self._next == self._path.shape[1]


class GivenThenSampled(Given):
    """The first data points, as many as there are paths, follow them; for all others choices are drawn."""

    def choose(self, log_p: Tensor) -> tuple[Tensor, Tensor | None]:
        first, others = log_p.tensor_split((len(self._path),))
        chosen = torch.cat((self._due(first), draw(others)))
        self._note(log_p, chosen)
        return chosen, None


class NoisyMixture(Route):
    """The `mixed` modules of the largest noisy logits, weighed by the softmax of those."""

    def __init__(self, mixed: int, noise: float):
        super().__init__()
        self.mixed, self.noise = mixed, noise

    def choose(self, log_p: Tensor) -> tuple[Tensor, Tensor | None]:
        noisy = log_p + self.noise * torch.randn_like(log_p)
        values, chosen = noisy.topk(min(self.mixed, log_p.shape[-1]))
        return chosen, values.softmax(-1)


@contextmanager
def routed(model: nn.Module, route: Route) -> Iterator[Route]:
    """Let the route decide for every modular layer of the model while the context is open."""
    layers = [layer for _, layer in conditional_layers(model) if hasattr(layer, "_route")]
    if not layers:
        raise ValueError("the model has no modular layer; nc.recode(model, where, layer=nc.modular.Linear) puts one in")
    before = [layer._route for layer in layers]
    for layer in layers:
        layer._route = route
    try:
        yield route
    finally:
        for layer, earlier in zip(layers, before, strict=True):
            layer._route = earlier
