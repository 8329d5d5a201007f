"""Methods against forgetting, on any `nn.Module`: call `step` instead of the optimiser's, and `finish` after a task.

Each pulls the weights towards earlier ones, strength * sum_i importance_i (w_i - anchor_i)^2 (no factor 1/2). The pull
is added to the gradients in closed form: nothing of it goes through autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from neurocoder_lab.continual.fisher import fisher

Name = Literal["adam", "adagrad", "l2", "si", "ewc", "oewc"]
Outputs = Callable[[Tensor], Tensor]


class Method:
    """Plain training: nothing protects what was learned."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def step(self, optimiser: torch.optim.Optimizer) -> None:
        """In place of `optimiser.step()`, after the backward of the task's own loss."""
        optimiser.step()

    def finish(self, outputs: Outputs, x: Tensor, y: Tensor) -> None:
        """A task has been learned.

        Args:
            outputs: gives its logits.
            x, y: its training data.
        """

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed stream needs, as flat tensors."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        pass


class Anchored(Method):
    """What L2, EWC and SI share: an importance and an anchor for each weight, none before the first task is over."""

    def __init__(self, model: nn.Module, strength: float):
        super().__init__(model)
        if not strength >= 0:
            raise ValueError(f"strength must not be negative, got {strength}")
        self.strength = strength
        self.importance: dict[str, Tensor] = {}
        self.anchor: dict[str, Tensor] = {}

    @torch.no_grad()
    def penalty(self) -> Tensor:
        """strength * sum_i importance_i (w_i - anchor_i)^2."""
        terms = [
            (self.importance[n] * (self.parameters[n] - anchor).square()).sum() for n, anchor in self.anchor.items()
        ]
        return self.strength * torch.stack(terms).sum() if terms else torch.zeros(())

    @torch.no_grad()
    def pull(self) -> None:
        """Add the gradient of the penalty; a weight without a gradient, such as another task's head, stays put."""
        for name, anchor in self.anchor.items():
            p = self.parameters[name]
            if p.grad is not None:
                p.grad.addcmul_(self.importance[name], p - anchor, value=2 * self.strength)

    def step(self, optimiser: torch.optim.Optimizer) -> None:
        self.pull()
        optimiser.step()

    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def state(self) -> dict[str, Tensor]:
        tables = {"importance": self.importance, "anchor": self.anchor}
        return {f"{kind}.{name}": tensor for kind, table in tables.items() for name, tensor in table.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            kind, _, rest = name.partition(".")
            getattr(self, kind)[rest] = tensor.to(self.parameters[rest].device)


class L2(Anchored):
    """Stay near the weights of the last task, all equally."""

    def finish(self, outputs: Outputs, x: Tensor, y: Tensor) -> None:
        self.anchor = self._weights()
        self.importance = {name: torch.ones_like(p) for name, p in self.anchor.items()}


class EWC(Anchored):
    """Elastic weight consolidation (Kirkpatrick et al. 2017): a Fisher and an anchor for every task.

    Quadratics add up to one: sum_t F_t (w - a_t)^2 = F (w - a)^2 + constant, with F the sum of the Fishers and a the
    mean of the anchors weighted by them. So any number of tasks costs the time and memory of one, exactly.

    Args:
        empirical: take the gradients at the true labels instead of the model's own predictions.
    """

    def __init__(self, model: nn.Module, strength: float, empirical: bool = False):
        super().__init__(model, strength)
        self.empirical = empirical

    def finish(self, outputs: Outputs, x: Tensor, y: Tensor) -> None:
        found = fisher(self.model, x, outputs, y if self.empirical else None)
        weights = self._weights()
        for name, new in found.items():
            old = self.importance.get(name)
            total = new if old is None else old + new
            self.anchor[name] = weights[name] if old is None else self._anchor(name, old, new, weights[name])
            self.importance[name] = total

    def _anchor(self, name: str, old: Tensor, new: Tensor, weights: Tensor) -> Tensor:
        total = old + new
        share = torch.where(total > 0, new / total, torch.ones_like(total))  # a difference keeps equal weights equal
        return self.anchor[name] + share * (weights - self.anchor[name])


class OnlineEWC(EWC):
    """EWC with one anchor, the weights of the last task, and the sum of all Fishers (Schwarz et al. 2018, no decay)."""

    def _anchor(self, name: str, old: Tensor, new: Tensor, weights: Tensor) -> Tensor:
        return weights


class SI(Anchored):
    """Synaptic intelligence (Zenke et al. 2017): what matters is what lowered the loss on the way.

    Args:
        damping: keeps importance finite where a weight hardly moved.
    """

    def __init__(self, model: nn.Module, strength: float, damping: float = 0.1):
        super().__init__(model, strength)
        self.damping = damping
        self.start = self._weights()
        self.path = {name: torch.zeros_like(p) for name, p in self.start.items()}

    def step(self, optimiser: torch.optim.Optimizer) -> None:
        before = {
            name: (p.detach().clone(), p.grad.clone()) for name, p in self.parameters.items() if p.grad is not None
        }
        super().step(optimiser)
        for name, (weights, gradient) in before.items():
            self.path[name].addcmul_(gradient, self.parameters[name].detach() - weights, value=-1)

    def finish(self, outputs: Outputs, x: Tensor, y: Tensor) -> None:
        weights = self._weights()
        for name, path in self.path.items():
            gained = path / ((weights[name] - self.start[name]).square() + self.damping)
            self.importance[name] = self.importance[name] + gained if name in self.importance else gained
            self.path[name] = torch.zeros_like(path)
        self.anchor, self.start = weights, {name: tensor.clone() for name, tensor in weights.items()}

    def state(self) -> dict[str, Tensor]:
        tables = {"start": self.start, "path": self.path}
        mine = {f"{kind}.{name}": tensor for kind, table in tables.items() for name, tensor in table.items()}
        return super().state() | mine


METHODS: dict[str, type[Anchored]] = {"l2": L2, "si": SI, "ewc": EWC, "oewc": OnlineEWC}


def make(name: Name, model: nn.Module, strength: float = 0.0) -> Method:
    """The method of that name; adam and adagrad are plain training with that optimiser."""
    if name in ("adam", "adagrad"):
        return Method(model)
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(Name.__args__)}, got {name!r}")
    return METHODS[name](model, strength)
