"""Methods against forgetting, on any `nn.Module`: call `step` instead of the optimiser's, and `finish` after a task.

Each pulls the weights towards earlier ones, strength * sum_i importance_i (w_i - anchor_i)^2 (no factor 1/2). The pull
is added to the gradients in closed form: nothing of it goes through autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Literal

import torch
from torch import Tensor, nn

from neurocoder_lab.continual.fisher import fisher

Name = Literal["adam", "adagrad", "l2", "si", "ewc", "oewc"]
TITLES = {"adam": "Adam", "adagrad": "Adagrad", "l2": "L2", "si": "SI", "ewc": "EWC", "oewc": "online EWC"}
Outputs = Callable[[Tensor], Tensor]
Extra = Callable[[], Tensor]


class Method:
    """Plain training: nothing protects what was learned."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.parameters = self._trained()
        if not self.parameters:
            raise ValueError("the model has no parameter that is trained")
        self._fresh = True  # nothing was checked since the last task

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _check(self, optimiser: torch.optim.Optimizer | None = None) -> None:
        """Raise unless the method, the model and the optimiser speak of the same parameters."""
        kind, now = type(self).__name__, self._trained()
        if now.keys() != self.parameters.keys() or any(now[name] is not p for name, p in self.parameters.items()):
            raise ValueError(f"the model's parameters changed after this {kind} was made: re-code and freeze before it")
        held = None if optimiser is None else {id(p) for group in optimiser.param_groups for p in group["params"]}
        if held is not None and not all(id(p) in held for p in now.values()):
            raise ValueError("the optimiser lacks parameters of the model: make it after re-coding, of this model")

    def step(self, optimiser: torch.optim.Optimizer) -> None:
        """In place of `optimiser.step()`, after the backward of the task's own loss."""
        if self._fresh:
            self._check(optimiser)
            self._fresh = False
        self._step(optimiser)

    def _step(self, optimiser: torch.optim.Optimizer) -> None:
        optimiser.step()

    def finish(self, outputs: Outputs, x: Tensor, y: Tensor, extra: Extra | None = None) -> None:
        """A task has been learned.

        Args:
            outputs: gives its logits.
            x, y: its training data.
            extra: a loss that was added to every batch's, such as an orthogonal loss: EWC counts it in every sample's.
                SI needs no telling, its path follows the whole gradient.
        """
        self._check()
        self._fresh = True
        self._finish(outputs, x, y, extra)

    def _finish(self, outputs: Outputs, x: Tensor, y: Tensor, extra: Extra | None) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed stream needs, as flat tensors."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave, of the same method and model; another's is refused, and changes nothing."""
        mine = type(self).__name__
        for key, tensor in state.items():
            if key.partition(".")[0] != mine:
                raise ValueError(f"{key} is not in the state of the {mine} of this model: is it another method's?")
            if not tensor.isfinite().all():
                raise ValueError(f"{key} of the state is not finite: training diverged before it was taken")
        self._load({key.partition(".")[2]: tensor for key, tensor in state.items()})

    def _load(self, state: dict[str, Tensor]) -> None:
        pass


class Anchored(Method):
    """What L2, EWC and SI share: an importance and an anchor for each weight, none before the first task is over."""

    _late = ("importance", "anchor")  # what a state lacks before the first task is over

    def __init__(self, model: nn.Module, strength: float):
        super().__init__(model)
        if not 0 <= strength < inf:
            raise ValueError(f"strength must be a number of at least 0, got {strength}")
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
        """Add the gradient of the penalty; a weight without a gradient stays put, such as another task's head, or a row
        that was not read where gradients are sparse."""
        for name, anchor in self.anchor.items():
            p, importance = self.parameters[name], self.importance[name]
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.coalesce()
                (rows,), values = p.grad.indices(), p.grad.values()
                values.addcmul_(importance[rows], p[rows] - anchor[rows], value=2 * self.strength)
            elif p.grad is not None:
                p.grad.addcmul_(importance, p - anchor, value=2 * self.strength)

    def _step(self, optimiser: torch.optim.Optimizer) -> None:
        self.pull()
        optimiser.step()

    def _weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def _tables(self) -> dict[str, dict[str, Tensor]]:
        return {"importance": self.importance, "anchor": self.anchor}

    def state(self) -> dict[str, Tensor]:
        mine, tables = type(self).__name__, self._tables().items()
        return {f"{mine}.{kind}.{name}": t.clone() for kind, table in tables for name, t in table.items()}

    def _load(self, state: dict[str, Tensor]) -> None:
        tables, mine = self._tables(), f"the state of the {type(self).__name__} of this model"
        for key, tensor in state.items():
            kind, _, name = key.partition(".")
            if kind not in tables or name not in self.parameters or tensor.shape != self.parameters[name].shape:
                raise ValueError(f"{key} of shape {tuple(tensor.shape)} is not in {mine}")
        given = {kind: [f"{kind}.{name}" in state for name in self.parameters] for kind in tables}
        odd = [kind for kind, has in given.items() if any(has) != all(has) or not (any(has) or kind in self._late)]
        if odd or given["importance"] != given["anchor"]:
            wanted = odd[0] if odd else "importance and anchor, or neither"
            raise ValueError(f"this is not all of {mine}: that has every parameter's {wanted}")
        for kind, table in tables.items():
            table.clear()
            if any(given[kind]):
                table |= {name: state[f"{kind}.{name}"].to(p, copy=True) for name, p in self.parameters.items()}


class L2(Anchored):
    """Stay near the weights of the last task, all equally."""

    def _finish(self, outputs: Outputs, x: Tensor, y: Tensor, extra: Extra | None) -> None:
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

    def _finish(self, outputs: Outputs, x: Tensor, y: Tensor, extra: Extra | None) -> None:
        importance = fisher(self.model, x, outputs, y if self.empirical else None, extra)
        weights = self._weights()
        for name, new in importance.items():
            if name not in self.importance:
                self.importance[name], self.anchor[name] = new, weights[name]
                continue
            total = self.importance[name] + new
            share = torch.where(total > 0, new / total, torch.ones_like(total))
            self.importance[name], self.anchor[name] = total, self._anchor(self.anchor[name], weights[name], share)

    def _anchor(self, old: Tensor, weights: Tensor, share: Tensor) -> Tensor:
        return old + share * (weights - old)


class OnlineEWC(EWC):
    """EWC with one anchor, the weights of the last task, and the sum of all Fishers (Schwarz et al. 2018, no decay)."""

    def _anchor(self, old: Tensor, weights: Tensor, share: Tensor) -> Tensor:
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

    def _step(self, optimiser: torch.optim.Optimizer) -> None:
        before = {
            name: (p.detach().clone(), p.grad.clone()) for name, p in self.parameters.items() if p.grad is not None
        }
        super()._step(optimiser)
        if getattr(optimiser, "step_was_skipped", False):  # a gradient overflowed in half precision
            return
        for name, (weights, gradient) in before.items():
            self.path[name].addcmul_(gradient.to_dense(), self.parameters[name].detach() - weights, value=-1)

    def _finish(self, outputs: Outputs, x: Tensor, y: Tensor, extra: Extra | None) -> None:
        weights = self._weights()
        for name, path in self.path.items():
            gained = path / ((weights[name] - self.start[name]).square() + self.damping)
            self.importance[name] = self.importance[name] + gained if name in self.importance else gained
            self.path[name] = torch.zeros_like(path)
        self.anchor, self.start = weights, {name: tensor.clone() for name, tensor in weights.items()}

    def _tables(self) -> dict[str, dict[str, Tensor]]:
        return super()._tables() | {"start": self.start, "path": self.path}


METHODS: dict[str, type[Anchored]] = {"l2": L2, "si": SI, "ewc": EWC, "oewc": OnlineEWC}


def make(name: Name, model: nn.Module, strength: float | None = None) -> Method:
    """The method of that name; adam and adagrad are plain training with that optimiser, and have no strength but 0."""
    if name not in Name.__args__:
        raise ValueError(f"method must be one of {', '.join(Name.__args__)}, got {name!r}")
    if name not in METHODS:
        if strength:
            raise ValueError(f"{name} is plain training and has no strength: leave it out, or give 0; got {strength}")
        return Method(model)
    if strength is None:
        raise ValueError(f"{name} needs a strength")
    return METHODS[name](model, strength)
