"""The cross-entropy of a linear layer with many outputs, without ever holding all of its logits.

A word model of 128 x 35 words and a vocabulary of 10,000 has 180 MB of logits, and as much again for each of softmax
and gradient. Here they are made for a few rows at a time, so few that a CPU's cache holds them, and reduced to one
number a row and to the gradients of the sum of all; the backward makes them again only where rows do not count alike.

Shapes: N rows, J features (the last is 1 where there is a bias), O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.precision import BITS, full_precision, in_memory

_NUMBERS = {"cpu": 2**18}  # logits at a time: what the cache of a CPU core holds
_ELSEWHERE = 2**26
_ROWS = 32  # at a time at least: a product of fewer is no faster than one of these
_SAFE = 60.0  # a log-sum-exp no further from 0 than this lost nothing to the ends of float32


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """The cross-entropy of a linear layer, -log softmax(x W^T + b) at the target of each row, whose logits are never
    in memory at once::

        F.cross_entropy(F.linear(x, weight, bias), target, reduction="none")  # the same, for x of two dimensions

    The logits are computed in blocks of rows, at least in float32, once where every row's loss counts the same, as in
    a sum or mean, and again in the backward where not. Compiled, and for second derivatives, it is those two functions.

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
        if torch.compiler.is_compiling():
            return _plain(*inputs).reshape(target.shape)
        wanted = torch.is_grad_enabled() and (x_NJ.requires_grad or weight_OJ.requires_grad)
        return _InBlocks.apply(*inputs, wanted and _can_look(x_NJ))[0].reshape(target.shape)


def _plain(x_NJ: Tensor, weight_OJ: Tensor, target_N: Tensor) -> Tensor:
    return F.cross_entropy(x_NJ @ weight_OJ.t(), target_N, reduction="none")


def _can_look(x: Tensor) -> bool:
    """Whether what to do may depend on numbers: they are there, and no other device need be waited for."""
    return type(x) is Tensor and x.is_cpu


class _InBlocks(torch.autograd.Function):
    """The loss of every row, (N,), and, computed ahead, the gradients of their sum, (N, J) and (O, J); else empty."""

    @staticmethod
    def forward(x_NJ: Tensor, weight_OJ: Tensor, target_N: Tensor, ahead: bool) -> tuple[Tensor, Tensor, Tensor]:
        return _losses(x_NJ, weight_OJ, target_N, x_NJ.new_ones(len(x_NJ)) if ahead else None)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        tensors = inputs[:3]
        ctx.ahead = output[1].shape == inputs[0].shape
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx, *d_outputs: Tensor):
        d_loss_N, (x_NJ, weight_OJ, target_N, *gradients) = d_outputs[0], ctx.saved_tensors
        if torch.is_grad_enabled() or not in_memory(d_loss_N):  # to be differentiated in turn, or a batch of gradients
            return *torch.func.vjp(lambda x, w: _plain(x, w, target_N), x_NJ, weight_OJ)[1](d_loss_N), None, None
        if ctx.ahead and (d_loss_N == d_loss_N[:1]).all():
            return *(d_loss_N[:1].sum() * gradient for gradient in gradients), None, None
        with full_precision(x_NJ):
            return *_losses(x_NJ, weight_OJ, target_N, d_loss_N)[1:], None, None

    @staticmethod
    def jvp(ctx, *tangents: Tensor | None):
        d_x, d_weight = tangents[:2]
        x_NJ, weight_OJ, target_N = ctx.saved_tensors[:3]
        along = (
            torch.zeros_like(x_NJ) if d_x is None else d_x,
            torch.zeros_like(weight_OJ) if d_weight is None else d_weight,
        )
        return torch.func.jvp(lambda x, w: _plain(x, w, target_N), (x_NJ, weight_OJ), along)[1], None, None

    @staticmethod
    def vmap(info, in_dims, *inputs: Tensor):
        """Mapped rows are so many more rows; a mapped weight makes a call each."""
        x, weight, target = inputs[:3]

        def members(value: Tensor, dim: int | None) -> Tensor:
            return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

        x, target = members(x, in_dims[0]), members(target, in_dims[2])
        if in_dims[1] is None:
            loss, *empty = _InBlocks.apply(x.flatten(0, 1), weight, target.flatten(), False)
            return (loss.view(target.shape), *empty), (0, None, None)
        calls = zip(x, members(weight, in_dims[1]), target, strict=True)
        losses, *empty = zip(*(_InBlocks.apply(*call, False) for call in calls), strict=True)
        return (torch.stack(losses), *(some[0] for some in empty)), (0, None, None)


def _buffer(x_NJ: Tensor, weight_OJ: Tensor) -> Tensor:
    """Room for the logits of a block of rows: memory that is asked for again and again costs more than the products."""
    most = _NUMBERS.get(x_NJ.device.type, _ELSEWHERE)
    return x_NJ.new_empty(min(max(1, len(x_NJ)), max(_ROWS, most // len(weight_OJ))), len(weight_OJ))


def _losses(
    x_NJ: Tensor, weight_OJ: Tensor, target_N: Tensor, counts_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of every row and, where counts say how much each one counts, the gradients of their weighted sum.

    With p the softmax and c the counts they are c (p - 1_target) W and (p - 1_target)^T c x. There are five passes over
    a block's logits: a product, exp, its sum, and two products; c, the sums and 1_target act on what is small. Each
    pass writes or reads outputs in a row, which on a CPU takes half the time of outputs in a column.
    """
    weight_JO, buffer = weight_OJ.t().contiguous(), _buffer(x_NJ, weight_OJ)
    size, norm_N, d_x_JN, d_weight_JO = len(buffer), x_NJ.new_empty(len(x_NJ)), x_NJ.new_empty(0), x_NJ.new_empty(0)
    if counts_N is not None:
        d_x_JN, d_weight_JO = x_NJ.new_empty(x_NJ.shape[::-1]), torch.zeros_like(weight_JO)
    for start in range(0, len(x_NJ), size):
        rows = slice(start, start + size)
        e, norm, total = _exp(x_NJ[rows] * BITS, weight_JO, buffer)
        norm_N[rows] = norm
        if counts_N is not None:
            torch.mm(weight_JO, e.t(), out=d_x_JN[:, rows]).div_(total)
            d_weight_JO.addmm_((x_NJ[rows] * (counts_N[rows] / total)[:, None]).t(), e)
    aimed_NJ = weight_OJ.index_select(0, target_N)
    loss_N = norm_N - (x_NJ * aimed_NJ).sum(1)
    if counts_N is None:
        return loss_N, d_x_JN, d_weight_JO
    d_x_NJ = (d_x_JN.t() - aimed_NJ).mul_(counts_N[:, None])
    d_weight_OJ = d_weight_JO.t().contiguous()
    return loss_N, d_x_NJ, d_weight_OJ.index_add_(0, target_N, x_NJ * counts_N[:, None], alpha=-1)


def _exp(bits_NJ: Tensor, weight_JO: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp of the logits of a block, perhaps by a factor a row; their log-sum-exp; and the sums of what is returned.

    On a CPU the largest of each row is taken off, two passes over the logits, only where exp of them as they are came
    near the ends of float32 in one of the rows.
    """
    out = buffer[: len(bits_NJ)]
    if _can_look(out):
        e = torch.mm(bits_NJ, weight_JO, out=out).exp2_()
        total_N = e.sum(1)
        norm_N = total_N.log()
        if (norm_N.abs() < _SAFE).all():
            return e, norm_N, total_N
    logits = torch.mm(bits_NJ, weight_JO, out=out)
    most_N = logits.amax(1)
    e = logits.sub_(most_N[:, None]).exp2_()
    total_N = e.sum(1)
    return e, total_N.log() + most_N / BITS, total_N
