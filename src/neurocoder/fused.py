"""The hand-written twin of `functional.compose_rows`: fewer passes over memory, and its own backward.

It treats each row by itself, so a `vmap` over it only makes more rows: the rule folds the mapped dimension into the
rows. What the rows share (keys, singular terms) gets its gradient from ordinary operations. Second and forward-mode
derivatives go through the plain function.

Facts of PyTorch on a CPU that shape the code: a comparison is several times faster into a float than into a bool
(`out=`), a reduction runs over whole vectors if its dimension comes before the contiguous ones, and an operation on a
few thousand numbers costs more to call than to carry out. So the recursion works on one contiguous block a step,
slots first: (J, P, M, H, N), in the letters of `neurocoder.functional`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.nn import functional as F

from neurocoder import functional, fused_lstm
from neurocoder.functional import Rules

_PAPER = Rules()
_RULES = ("first_step", "usage", "least_used", "content", "order")
_ROUNDS = 8  # up to so many least-used slots, rounds of minima are faster than a selection
_BLOCK = 65536  # numbers in one step's attention: what the cache holds several of
_SAFE = 40.0  # exp(±40) and sums of it are far from the limits of float32: no maximum need be subtracted


class Setting(NamedTuple):
    """What is no tensor."""

    steps: int
    heads: int
    least_used: int
    sharpness: float


def compose_rows(
    signal: Tensor,
    recurrent: Tensor | None,
    key_MPK: Tensor,
    gate: Tensor | None,
    read_PN: Tensor,
    values_P: Tensor,
    setting: Setting,
    rules: Rules,
) -> tuple[Tensor, Tensor]:
    """`functional.compose_rows`, by hand where the rules are the paper's; the compiler fuses the plain one itself.

    The signal is the queries (M, K, R, N) or, with recurrent weights (4U, U), that of the LSTM whose states they are.
    """
    if gate is None and recurrent is None and rules.order == "ascending" and not torch.compiler.is_compiling():
        paper = replace(rules, order="descending")  # the same sum, with the components in the opposite order
        part, sigma = compose_rows(signal.flip(2), None, key_MPK, None, read_PN, values_P, setting, paper)
        return part, sigma.flip(0)
    matters = _RULES if gate is not None else ("order",)
    by_hand = all(getattr(rules, name) == getattr(_PAPER, name) for name in matters)
    if not by_hand or torch.compiler.is_compiling():
        return _plain(signal, key_MPK, read_PN, values_P, gate, recurrent, setting=setting, rules=rules)
    block = max(_BLOCK // (3 * len(values_P) * setting.heads), 1)
    if gate is None or read_PN.shape[1] <= block:
        return _Compose.apply(signal, recurrent, key_MPK, gate, read_PN, values_P, setting)[:2]
    blocks = zip(*(t.split(block, -1) for t in (signal, gate, read_PN)), strict=True)
    parts = [_Compose.apply(one, recurrent, key_MPK, gate, read, values_P, setting)[:2] for one, gate, read in blocks]
    part, sigma = (torch.cat(pieces, -1) for pieces in zip(*parts, strict=True))
    return part, sigma


def _plain(signal, key, read, values, gate=None, recurrent=None, *, setting: Setting, rules: Rules = _PAPER):
    query = signal
    if recurrent is not None:
        query = functional.queries(functional.lstm(signal, recurrent, setting.steps), key.shape[2], setting.heads)
    options = (setting.heads, setting.least_used, setting.sharpness, rules)
    return functional.compose_rows(query, key, gate, read, values, *options)


class _Compose(torch.autograd.Function):
    """Part (P, N) and sigma (R, N), then what backward needs."""

    @staticmethod
    def forward(signal, recurrent, key, gate, read, values, setting):
        rows, (steps, heads, least_used, sharpness) = read.shape[1], setting
        nothing = read.new_empty(0, rows)
        if recurrent is None:
            query, remembered = signal.view(3, key.shape[2], steps, heads, rows), (nothing,) * 4
        else:
            remembered = fused_lstm.forward(signal, recurrent, steps)
            query = remembered[0][:, : 3 * key.shape[2] * heads].unflatten(1, (3, -1, heads)).permute(1, 2, 0, 3, 4)
        unit_MKJHN, scale = _unit(query, 1)
        sharp = _unit(key, 2)[0].mul_(sharpness)
        score_MPX = torch.bmm(sharp, unit_MKJHN.flatten(2))
        score_JPMHN = score_MPX.view(3, key.shape[1], steps, heads, rows).permute(2, 1, 0, 3, 4)
        if sharpness > _SAFE:
            score_JPMHN = score_JPMHN - score_JPMHN.amax(1, keepdim=True)
        if gate is None:
            content = score_JPMHN.exp_()
        else:  # the recursion wants its steps in one piece each
            content = torch.exp(score_JPMHN, out=score_MPX.new_empty(score_JPMHN.shape))
        del score_MPX, score_JPMHN  # what is freed here is written next, while it is in the cache
        content.div_(content.sum(1, keepdim=True))
        if gate is None:
            attention, recursion = content, (nothing,) * 5
        else:
            open_ = _by_step(gate, heads).sigmoid().contiguous()
            attention, *recursion = _recur(content, open_, least_used)
            recursion = (attention, open_, *recursion)
        left_JPHN, right_JPHN, weights_JPHN = attention.unbind(2)
        work_JPHN = left_JPHN * read[:, None]
        inner_JHN = work_JPHN.sum(1)
        terms_JHN = torch.matmul(values, weights_JPHN.flatten(2)).view_as(inner_JHN)
        sigma_RN = F.softplus(terms_JHN).flatten(0, 1).flip(0).cumsum(0).flip(0)
        outer_JHN = inner_JHN * sigma_RN.view_as(inner_JHN)
        part_PN = torch.mul(right_JPHN, outer_JHN[:, None], out=work_JPHN).sum(0).sum(1)
        return part_PN, sigma_RN, unit_MKJHN, scale, content, inner_JHN, terms_JHN, *recursion, *remembered

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.setting = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        d_part, d_sigma = grads[:2]
        signal, recurrent, key, gate, read, values, sigma, *kept = ctx.saved_tensors
        d_part = torch.zeros_like(read) if d_part is None else d_part
        d_sigma = torch.zeros_like(sigma) if d_sigma is None else d_sigma
        if torch.is_grad_enabled() or is_legacy_batchedtensor(d_part):  # to be differentiated in turn, or batched
            plain, given, order = _differentiable(ctx)
            found = dict(zip(order, torch.func.vjp(plain, *given)[1]((d_part, d_sigma)), strict=True))
            return *(found.get(place) for place in range(6)), None
        with functional.full_precision(d_part):
            d_query, *found = _backward(d_part, d_sigma, key, gate, read, values, sigma, *kept[:10], ctx.setting)
            if recurrent is None:
                return d_query.view_as(signal), None, *found, None
            return *fused_lstm.backward(d_query, recurrent, *kept[10:]), *found, None

    @staticmethod
    def jvp(ctx, *tangents):
        plain, given, order = _differentiable(ctx)
        along = [torch.zeros_like(t) if tangents[i] is None else tangents[i] for i, t in zip(order, given, strict=True)]
        _, directions = torch.func.jvp(plain, tuple(given), tuple(along))[:2]
        return *directions, *[None] * 14

    @staticmethod
    def vmap(info, in_dims, *args):
        return _fold(_Compose, info, in_dims, args, shared=(1, 2, 5))


def _differentiable(ctx):
    """The plain function of the given tensors, those tensors, and their places among the arguments."""
    tensors = dict(enumerate(ctx.saved_tensors[:6]))
    order = [0, 2, 4, 5] + [place for place in (3, 1) if tensors[place] is not None]
    names = {0: "signal", 2: "key", 4: "read", 5: "values", 3: "gate", 1: "recurrent"}

    def plain(*given):
        return _plain(**{names[place]: tensor for place, tensor in zip(order, given, strict=True)}, setting=ctx.setting)

    return plain, [tensors[place] for place in order], order


def _unit(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    scale = x.square().sum(dim, keepdim=True).add_(functional.EPSILON).rsqrt_()
    return torch.mul(x, scale, out=x.new_empty(x.shape)), scale


def _through_unit(d_unit: Tensor, unit: Tensor, scale: Tensor, dim: int) -> Tensor:
    return d_unit.addcmul_(unit, (unit * d_unit).sum(dim, keepdim=True), value=-1).mul_(scale)


def _by_step(gate_MPRN: Tensor, heads: int) -> Tensor:
    """Gates as (J or 1, P, M, H, N)."""
    gate_JPMHN = gate_MPRN.transpose(0, 1).unflatten(2, (-1, heads if gate_MPRN.shape[2] > 1 else 1)).movedim(2, 0)
    return gate_JPMHN.expand(-1, -1, -1, heads, -1)


def _backward(
    d_part, d_sigma, key, gate, read, values, sigma, unit, scale, content, inner, terms, attention, open_, usage, least,
    top, setting,
):  # fmt: skip
    """Gradients of query (M, K, J, H, N), key, gate, read and values."""
    if gate is None:
        attention = content
    left, right, weights = attention.unbind(2)
    d_attention = torch.empty_like(content)
    d_left, d_right, d_weights = d_attention.unbind(2)
    sigma = sigma.view_as(inner)
    d_outer = torch.mul(right, d_part[:, None], out=d_right).sum(1)
    torch.mul(d_part[:, None], (inner * sigma)[:, None], out=d_right)
    d_inner = d_outer * sigma
    d_read = torch.mul(left, d_inner[:, None], out=d_left).sum(0).sum(1)
    torch.mul(read[:, None], d_inner[:, None], out=d_left)
    d_terms = torch.addcmul(d_sigma.view_as(inner), d_outer, inner).flatten(0, 1).cumsum(0).view_as(inner)
    d_terms.mul_(terms.sigmoid())
    d_values = torch.mul(weights, d_terms[:, None], out=d_weights).sum(0).sum((1, 2))
    torch.mul(values[:, None, None], d_terms[:, None], out=d_weights)

    d_gate = None
    if gate is not None:
        shut = 1 - open_
        d_gate = _recur_backward(d_attention, content, shut, usage, least, top)
        d_gate.mul_(open_).mul_(shut)
        d_attention.mul_(open_)
        d_gate = (
            d_gate.movedim(0, 2).flatten(2, 3).transpose(0, 1)
            if gate.shape[2] > 1
            else (d_gate[0].sum(2, keepdim=True).transpose(0, 1))
        )
    d_attention.mul_(content)
    correction = d_attention.sum(1, keepdim=True)
    if gate is None:
        d_score_MPJHN = d_attention.addcmul_(content, correction, value=-1).permute(2, 1, 0, 3, 4)
    else:
        d_score_MPJHN = content.new_empty(3, key.shape[1], *unit.shape[2:])
        torch.addcmul(d_attention, content, correction, value=-1, out=d_score_MPJHN.permute(2, 1, 0, 3, 4))
    d_score_MPX = d_score_MPJHN.flatten(2)
    sharp, key_scale = _unit(key, 2)
    d_unit = torch.bmm(sharp.transpose(1, 2) * setting.sharpness, d_score_MPX).view_as(unit)
    d_key = torch.bmm(d_score_MPX, unit.flatten(2).transpose(1, 2)).mul_(setting.sharpness)
    return (_through_unit(d_unit, unit, scale, 1), _through_unit(d_key, sharp, key_scale, 2), d_gate, d_read, d_values)


def _recur(content, open_, least_used):
    """Eq. 12 to 14 over the steps: attention, and for each step but the first its usage, least-used attention and
    largest usage."""
    attention = torch.empty_like(content)
    usage, least = torch.empty_like(content[1:]), torch.empty_like(content[1:])
    top = content.new_empty(len(usage), *content.shape[2:])
    rest, among = torch.empty_like(content[0]), torch.empty_like(content[0])
    last = None
    steps = zip(content.unbind(0), open_.expand_as(content).unbind(0), attention.unbind(0), [None, *usage.unbind(0)],
                [None, *least.unbind(0)], [None, *top.unbind(0)], strict=True)  # fmt: skip
    for c, g, w, m, l, high in steps:
        if m is None:
            torch.mul(c, g, out=w)
        else:
            m.copy_(last[0]) if last[1] is None else torch.maximum(last[0], last[1], out=m)
            _among_least_used(m, least_used, rest, out=among)
            torch.sub(torch.amax(m, 0, out=high), m, out=l).mul_(among)
            torch.lerp(l, c, g, out=w)
        last = (w, m)
    return attention, usage, least, top


def _among_least_used(usage, count, rest, out):
    """1 for the slots whose usage is at most the `count`-th smallest, 0 for the others."""
    if count <= _ROUNDS and usage.is_cpu:
        threshold, remaining = usage.amin(0), usage
        for _ in range(count - 1):
            torch.le(remaining, threshold, out=out)
            remaining = torch.add(remaining, out, alpha=4.0, out=rest)  # attention is at most 1
            threshold = rest.amin(0)
        torch.le(usage, threshold, out=out)
        if out.sum().item() <= count * threshold.numel():
            return
        # Some usages are equal, and rounds of minima count those as one.
    threshold = usage.topk(count, dim=0, largest=False, sorted=False).values.amax(0)
    torch.le(usage, threshold, out=out)


def _recur_backward(d_attention, content, shut, usage, least, top):
    """Add to each step's gradient what its attention did to later steps; return the gradient of the open gates."""
    d_gate = torch.zeros_like(shut)
    one, two, d_usage = content.new_empty((3, *content.shape[1:]))
    d_usage.zero_()
    by_step = (d_attention, content, shut.expand_as(content), d_gate.expand_as(content))
    steps = zip(*(t[1:].unbind(0) for t in by_step), usage.unbind(0), least.unbind(0), top.unbind(0), strict=True)
    later = None
    for d, c, s, d_g, m, l, high in reversed([*steps]):
        if later is not None:  # where this step's attention is the largest yet, it is the next step's usage
            torch.gt(later, m, out=one).mul_(d_usage)
            d_usage.sub_(one)
            d.add_(one)
        torch.gt(l, 0, out=one).mul_(d).mul_(s)
        torch.eq(m, high, out=two)
        d_usage.sub_(one).addcmul_(two, one.sum(0).div_(two.sum(0)))  # equal maxima share the gradient
        d_g.addcmul_(torch.sub(c, l, out=one), d)
        later = m
    first = d_attention[0].add_(d_usage)
    d_gate[0].addcmul_(content[0], first)
    return d_gate


def _fold(function: type[torch.autograd.Function], info, in_dims, args, shared):
    """The vmap rule. Where arguments that rows share are mapped too, each of their members gets a call of its own."""
    if any(in_dims[place] is not None for place in shared):
        mapped = [dim if isinstance(arg, Tensor) else None for arg, dim in zip(args, in_dims, strict=True)]
        calls = [
            function.apply(*(a if dim is None else a.select(dim, i) for a, dim in zip(args, mapped, strict=True)))
            for i in range(info.batch_size)
        ]
        outputs = tuple(torch.stack(outs) for outs in zip(*calls, strict=True))
        return outputs, (0,) * len(outputs)
    folded = []
    for place, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
        if isinstance(arg, Tensor) and place not in shared:
            arg = arg.unsqueeze(0) if dim is None else arg.movedim(dim, 0)
            arg = arg.expand(info.batch_size, *arg.shape[1:]).movedim(0, -2).flatten(-2)
        folded.append(arg)
    outputs = tuple(out.unflatten(-1, (info.batch_size, -1)) for out in function.apply(*folded))
    return outputs, tuple(out.dim() - 2 for out in outputs)
