"""Sending rows to the parts they chose: experts of a mixture, modules of a pool.

Shapes: Y rows, S slots (choices of a row), M parts, O output of a part (one axis or several).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Dispatch = Literal["sparse", "dense"]
Part = Callable[[Tensor], Tensor]


def check_dispatch(dispatch: str) -> None:
    if dispatch not in ("sparse", "dense"):
        raise ValueError(f"dispatch must be 'sparse' or 'dense', got {dispatch!r}")


def send(parts: Sequence[Part], x_Y: Tensor, chosen_YS: Tensor, dispatch: Dispatch) -> Tensor:
    """What the chosen parts make of each row, (Y, S, O).

    Sparse dispatch computes the chosen parts alone; which rows go where decides the shapes, so it can be neither
    compiled nor run without data. There, and where the layer says so, every part computes every row.
    """
    if dispatch == "dense" or x_Y.is_meta or torch.compiler.is_compiling():
        return _dense(parts, x_Y, chosen_YS)
    return _sparse(parts, x_Y, chosen_YS)


def _sparse(parts: Sequence[Part], x_Y: Tensor, chosen_YS: Tensor) -> Tensor:
    slots = chosen_YS.shape[1]
    chosen, order = chosen_YS.flatten().sort(stable=True)
    counts = torch.bincount(chosen, minlength=len(parts)).tolist()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    pieces = _Gather.apply(x_Y, order, place, slots).split(counts)
    # data-parallel training waits for a gradient of every parameter: there, a part without rows computes none of them
    everyone = torch.distributed.is_available() and torch.distributed.is_initialized()
    made = [part(piece) for part, piece in zip(parts, pieces, strict=True) if everyone or len(piece)]
    if not made:  # an empty batch
        return parts[0](x_Y)[:, None].repeat_interleave(slots, 1)
    return _Gather.apply(torch.cat(made), place, order, 1).unflatten(0, (len(x_Y), slots))


def _dense(parts: Sequence[Part], x_Y: Tensor, chosen_YS: Tensor) -> Tensor:
    first = parts[0]
    if all(type(part) is nn.Linear for part in parts):
        made = F.linear(x_Y, *side_by_side(parts)).unflatten(-1, (len(parts), -1))
    elif isinstance(first, nn.Conv2d) and all(type(part) is nn.Conv2d for part in parts) and _plain(first):
        weight, bias = side_by_side(parts)
        made = F.conv2d(x_Y, weight, bias, first.stride, first.padding, first.dilation)
        made = made.unflatten(1, (len(parts), -1))
    else:
        made = torch.stack([part(x_Y) for part in parts], 1)
    return picked(made, chosen_YS)


def _plain(part: nn.Conv2d) -> bool:
    """Whether kernels of several such parts, side by side, are one convolution."""
    return part.groups == 1 and part.padding_mode == "zeros"


def side_by_side(parts: Iterable[Any]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the one layer that makes the outputs of all these layers, one after the other."""
    weights, biases = zip(*((part.weight, part.bias) for part in parts), strict=True)
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


def picked(made_YM: Tensor, chosen_YS: Tensor) -> Tensor:
    """Of what all parts made (Y, M, O), what the chosen ones did, (Y, S, O)."""
    index = chosen_YS.reshape(*chosen_YS.shape, *[1] * (made_YM.dim() - 2)).expand(-1, -1, *made_YM.shape[2:])
    return made_YM.gather(1, index)


class _Gather(torch.autograd.Function):
    """Row order[i] // slots of x for every i. Its backward gathers too, which costs a fraction of scattering."""

    @staticmethod
    def forward(x_Y: Tensor, order: Tensor, place: Tensor, slots: int) -> Tensor:
        return x_Y.index_select(0, order if slots == 1 else order // slots)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, order, place, ctx.slots = inputs
        ctx.save_for_backward(order, place)

    @staticmethod
    def backward(ctx, *d_output: Tensor):
        order, place = ctx.saved_tensors
        d_x = _Gather.apply(d_output[0], place, order, 1)
        return d_x if ctx.slots == 1 else d_x.unflatten(0, (-1, ctx.slots)).sum(1), None, None, None
