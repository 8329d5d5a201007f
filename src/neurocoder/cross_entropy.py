"""The cross-entropy of a linear layer with many outputs, without ever holding all of its logits.

A word model of 128 x 35 words and a vocabulary of 10,000 has 180 MB of logits, and as much again for each of softmax
and gradient. Here they are made for a few rows at a time, so few that a CPU's cache holds them, reduced to one number a
row, and made again in the backward.

Shapes: N rows, J features (the last is 1 where there is a bias), O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.precision import full_precision, in_memory

_NUMBERS = {"cpu": 2**18}  # logits at a time: what the cache of a CPU core holds
_ELSEWHERE = 2**26
_ROWS = 32  # at a time at least: a product of fewer is no faster than one of these
_SAFE = 60.0  # a log-sum-exp no further from 0 than this lost nothing to the ends of float32


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """The cross-entropy of a linear layer, -log softmax(x W^T + b) at the target of each row, whose logits are never
    in memory at once::

        F.cross_entropy(F.linear(x, weight, bias), target, reduction="none")  # the same, for x of two dimensions

    The logits are computed in blocks of rows, at least in float32, and again in the backward. Compiled, and for second
    derivatives, it is those two functions.

    Args:
        x: (..., in_features).
        weight, bias: of an `nn.Linear`, (out_features, in_features) and (out_features,) or None.
        target: (...), indices of outputs.

    Returns:
        (...), not reduced.
    """
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"expected x of (..., {weight.shape[-1]}), got {tuple(x.shape)} for {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias of ({len(weight)},), got {tuple(bias.shape)} for {tuple(weight.shape)}")
    if target.shape != x.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(
            f"expected targets of shape {tuple(x.shape[:-1])}, int64; got {tuple(target.shape)}, {target.dtype}"
        )
    with full_precision(x):
        kind = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
        x_NJ, weight_OJ = x.reshape(-1, x.shape[-1]).to(kind), weight.to(kind)
        if bias is not None:
            x_NJ = F.pad(x_NJ, (0, 1), value=1.0)
            weight_OJ = torch.cat((weight_OJ, bias.to(kind)[:, None]), 1)
        inputs = x_NJ, weight_OJ, target.reshape(-1)
        loss_N = _plain(*inputs) if torch.compiler.is_compiling() else _InBlocks.apply(*inputs)[0]
        return loss_N.reshape(target.shape)


def _plain(x_NJ: Tensor, weight_OJ: Tensor, target_N: Tensor) -> Tensor:
    return F.cross_entropy(x_NJ @ weight_OJ.t(), target_N, reduction="none")


class _InBlocks(torch.autograd.Function):
    """Loss and log-sum-exp of every row, (N,) each."""

    @staticmethod
    def forward(x_NJ: Tensor, weight_OJ: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        norm_N = _norms(x_NJ, weight_OJ)
        return norm_N - (x_NJ * weight_OJ.index_select(0, target_N)).sum(1), norm_N

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, *d_outputs: Tensor):
        d_loss_N, (x_NJ, weight_OJ, target_N, norm_N) = d_outputs[0], ctx.saved_tensors
        if torch.is_grad_enabled() or not in_memory(d_loss_N):  # to be differentiated in turn, or a batch of gradients
            return *torch.func.vjp(lambda x, w: _plain(x, w, target_N), x_NJ, weight_OJ)[1](d_loss_N), None
        with full_precision(x_NJ):
            return *_backward(d_loss_N, x_NJ, weight_OJ, target_N, norm_N), None

    @staticmethod
    def jvp(ctx, *tangents: Tensor | None):
        d_x, d_weight, _ = tangents
        x_NJ, weight_OJ, target_N = ctx.saved_tensors[:3]
        along = (
            torch.zeros_like(x_NJ) if d_x is None else d_x,
            torch.zeros_like(weight_OJ) if d_weight is None else d_weight,
        )
        return torch.func.jvp(lambda x, w: _plain(x, w, target_N), (x_NJ, weight_OJ), along)[1], None

    @staticmethod
    def vmap(info, in_dims, *inputs: Tensor):
        """Mapped rows are so many more rows; a mapped weight makes a call each."""
        x, weight, target = inputs

        def members(value: Tensor, dim: int | None) -> Tensor:
            return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

        x, target = members(x, in_dims[0]), members(target, in_dims[2])
        if in_dims[1] is None:
            made = _InBlocks.apply(x.flatten(0, 1), weight, target.flatten())
            return tuple(value.view(target.shape) for value in made), (0, 0)
        calls = zip(x, members(weight, in_dims[1]), target, strict=True)
        made = zip(*(_InBlocks.apply(*call) for call in calls), strict=True)
        return tuple(torch.stack(values) for values in made), (0, 0)


def _buffer(x_NJ: Tensor, weight_OJ: Tensor) -> Tensor:
    """Room for the logits of a block of rows: memory that is asked for again and again costs more than the products."""
    most = _NUMBERS.get(x_NJ.device.type, _ELSEWHERE)
    return x_NJ.new_empty(min(max(1, len(x_NJ)), max(_ROWS, most // len(weight_OJ))), len(weight_OJ))


def _norms(x_NJ: Tensor, weight_OJ: Tensor) -> Tensor:
    """Log-sum-exp of the logits of every row. On a CPU the largest of a row is taken off, two passes over the logits,
    only where exp of them as they are came near the ends of float32."""
    if x_NJ.device.type != "cpu":
        return _norms_in_blocks(x_NJ, weight_OJ, shift=True)
    norm_N = _norms_in_blocks(x_NJ, weight_OJ, shift=False)
    lost_N = ~(norm_N.abs() < _SAFE)
    if lost_N.any():
        norm_N[lost_N] = _norms_in_blocks(x_NJ[lost_N], weight_OJ, shift=True)
    return norm_N


def _norms_in_blocks(x_NJ: Tensor, weight_OJ: Tensor, shift: bool) -> Tensor:
    norm_N, buffer, weight_JO = x_NJ.new_empty(len(x_NJ)), _buffer(x_NJ, weight_OJ), weight_OJ.t().contiguous()
    for block, rows in zip(x_NJ.split(len(buffer)), norm_N.split(len(buffer)), strict=True):
        logits = torch.mm(block, weight_JO, out=buffer[: len(block)])
        if shift:
            most = logits.amax(1, keepdim=True)
            torch.add(logits.sub_(most).exp_().sum(1).log_(), most.squeeze(1), out=rows)
        else:
            torch.sum(logits.exp_(), 1, out=rows).log_()
    return norm_N


def _backward(
    d_loss_N: Tensor, x_NJ: Tensor, weight_OJ: Tensor, target_N: Tensor, norm_N: Tensor
) -> tuple[Tensor, Tensor]:
    """With p the softmax and d the gradient of the losses: d (p - 1_target) W, and (p - 1_target)^T d x.

    The norm of the softmax is one feature more of x, so that the product gives log p at once; d and 1_target act on
    what is small. Over a block's logits there are four passes: a product, exp, and two products; each writes or reads
    outputs in a row, which on a CPU takes half the time of outputs in a column.
    """
    scaled_NJ, weight_JO = x_NJ * d_loss_N[:, None], weight_OJ.t().contiguous()
    longer_N, longer_O = torch.cat((x_NJ, -norm_N[:, None]), 1), F.pad(weight_JO, (0, 0, 0, 1), value=1.0)
    d_x_JN, d_weight_JO = x_NJ.new_empty(x_NJ.shape[::-1]), torch.zeros_like(weight_JO)
    buffer = _buffer(x_NJ, weight_OJ)
    blocks = longer_N.split(len(buffer)), scaled_NJ.split(len(buffer)), d_x_JN.split(len(buffer), 1)
    for longer, scaled, out in zip(*blocks, strict=True):
        p = torch.mm(longer, longer_O, out=buffer[: len(longer)]).exp_()
        torch.mm(weight_JO, p.t(), out=out)
        d_weight_JO.addmm_(scaled.t(), p)
    d_x = (d_x_JN.t() - weight_OJ.index_select(0, target_N)).mul_(d_loss_N[:, None])
    return d_x, d_weight_JO.t().contiguous().index_add_(0, target_N, scaled_NJ, alpha=-1)
