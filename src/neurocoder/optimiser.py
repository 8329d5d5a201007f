"""Adam for parameters of which a step moves a few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SparseAdam(torch.optim.SparseAdam):
    """`torch.optim.SparseAdam`, the same numbers in less time: rows with a gradient are gathered, moved and put back,
    where PyTorch adds sparse tensors to dense ones. Its state is the same: either goes on from the other's.

    Gradients are those of whole rows, as of program memories and `nn.Embedding`, both with `sparse=True`.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None if closure is None else torch.enable_grad()(closure)()
        given = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, _ in given:
            if not p.grad.is_sparse:
                raise RuntimeError(
                    f"SparseAdam takes sparse gradients, got a dense one for {tuple(p.shape)}: nc.split_parameters "
                    "tells which have them. All are dense without sparse=True, under torch.compile or torch.func, and "
                    "with create_graph=True; Adam takes those"
                )
            if p.grad.sparse_dim() != 1:
                raise RuntimeError(
                    f"this SparseAdam takes gradients of whole rows, got one of {p.grad.sparse_dim()} sparse "
                    f"dimensions for {tuple(p.shape)}: torch.optim.SparseAdam takes those"
                )
        for p, group in given:
            self._move(p, group)
        return loss

    def _move(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        rows, gradient = _rows(p.grad)
        if not len(rows):
            return
        first, second = group["betas"]
        if group.get("maximize", False):  # older states do not have it
            gradient = -gradient
        mean = state["exp_avg"].index_select(0, rows).lerp_(gradient, 1 - first)
        square = state["exp_avg_sq"].index_select(0, rows).lerp_(gradient.square(), 1 - second)
        state["exp_avg"].index_copy_(0, rows, mean)
        state["exp_avg_sq"].index_copy_(0, rows, square)
        count = state["step"]
        size = float(group["lr"]) * (1 - second**count) ** 0.5 / (1 - first**count)
        moved = p.index_select(0, rows).addcdiv_(mean, square.sqrt_().add_(group["eps"]), value=-size)
        p.index_copy_(0, rows, moved)  # index_add_ takes several times as long


def _rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a sparse gradient, each once, and their values. Autograd forgets that they were in order."""
    rows = gradient._indices()[0]
    if not gradient.is_coalesced() and not (rows[1:] > rows[:-1]).all():
        gradient = gradient.coalesce()
    return gradient._indices()[0], gradient._values()
