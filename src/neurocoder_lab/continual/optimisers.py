"""Adam for models of which some gradients are sparse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, Optimizer

import neurocoder as nc


class Together(Optimizer):
    """Several optimisers of different parameters as one: one `step`, one `state_dict`."""

    def __init__(self, *optimisers: Optimizer):
        self.optimisers = optimisers
        super().__init__([group for optimiser in optimisers for group in optimiser.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Each works on its groups, and on the state, of the whole."""
        at = 0
        for optimiser in self.optimisers:
            count = len(optimiser.param_groups)
            optimiser.param_groups = self.param_groups[at : at + count]
            optimiser.state = self.state
            at += count

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for optimiser in self.optimisers:
            optimiser.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def adam(model: nn.Module, rate: float) -> Optimizer:
    """Adam; of what has sparse gradients, only the rows that were read move."""
    rest, rows = nc.split_parameters(model)
    dense = Adam(rest, lr=rate, fused=True)
    return Together(dense, nc.SparseAdam(rows, lr=rate)) if rows else dense
