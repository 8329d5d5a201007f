"""The hand-written twin of `functional.compose_rows`: fewer passes over memory, and its own backward.

It treats each row by itself, so a `vmap` over it only makes more rows: the rule folds the mapped dimension into the
rows. What the rows share (keys, singular terms) gets its gradient from ordinary operations. Second derivatives go
through the plain functions.

Two facts of PyTorch on a CPU shape the code: a comparison is several times faster into a float than into a bool
(`out=`), and reductions over a dimension that is not the last run over whole vectors.

Shapes: see `neurocoder.functional`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.nn import functional as F

from neurocoder import functional
from neurocoder.functional import Rules

_PAPER = Rules()
_RULES = ("first_step", "usage", "least_used", "content", "order")
_ROUNDS = 8  # up to so many least-used slots, rounds of minima are faster than a selection
_SAFE = 40.0  # exp(±40) and sums of it are far from the limits of float32: no maximum need be subtracted


def compose_rows(
    query_MKRN: Tensor,
    key_MPK: Tensor,
    gate: Tensor | None,
    read_PN: Tensor,
    values_P: Tensor,
    heads: int,
    least_used: int,
    sharpness: float,
    rules: Rules,
) -> tuple[Tensor, Tensor]:
    """`functional.compose_rows`, by hand where the rules are the paper's; the compiler fuses the plain one itself."""
    by_hand = all(getattr(rules, name) == getattr(_PAPER, name) for name in _RULES)
    if not by_hand or torch.compiler.is_compiling():
        return functional.compose_rows(
            query_MKRN, key_MPK, gate, read_PN, values_P, heads, least_used, sharpness, rules
        )
    part, sigma, *_ = _Compose.apply(query_MKRN, key_MPK, gate, read_PN, values_P, heads, least_used, sharpness)
    return part, sigma


class _Compose(torch.autograd.Function):
    """Part (P, N) and sigma (R, N), then what backward needs."""

    @staticmethod
    def forward(query, key, gate, read, values, heads, least_used, sharpness):
        scale = query.square().sum(1, keepdim=True).clamp_min_(functional.TINY).rsqrt_()
        unit = query * scale
        content = torch.bmm(key, unit.flatten(2)).unflatten(2, query.shape[2:])
        if sharpness > _SAFE:
            content.sub_(content.amax(1, keepdim=True))
        content.exp_()
        content.div_(content.sum(1, keepdim=True))
        if gate is None:
            open_ = least = usage = among = content.new_empty(0)
            attention = content
        else:
            open_, attention, least = gate.sigmoid(), torch.empty_like(content), torch.empty_like(content)
            usage, among = torch.empty_like(content), torch.empty_like(content)
            _recur(content, open_, attention, least, usage, among, heads, least_used)
        left, right, weights = attention.unbind(0)
        work = read[:, None] * left
        inner = work.sum(0)
        terms = (values @ weights.flatten(1)).unflatten(0, inner.shape)
        sigma = F.softplus(terms).flip(0).cumsum(0).flip(0)
        part = torch.mul(inner * sigma, right, out=work).sum(1)
        if gate is None:
            attention = attention.clone()
        return part, sigma, unit, scale, content, attention, open_, least, usage, among, inner, terms

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, gate, read, values, ctx.heads, ctx.least_used, ctx.sharpness = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, gate, read, values, *output[1:])
        ctx.save_for_forward(query, key, gate, read, values)

    @staticmethod
    def backward(ctx, d_part, d_sigma, *_):
        query, key, gate, read, values, sigma, unit, scale, content, attention, *kept = ctx.saved_tensors
        d_part = torch.zeros_like(read) if d_part is None else d_part
        d_sigma = torch.zeros_like(sigma) if d_sigma is None else d_sigma
        if torch.is_grad_enabled() or is_legacy_batchedtensor(d_part):  # to be differentiated, or batched
            plain, given = _plain(ctx, query, key, gate, read, values)
            d_query, d_key, d_read, d_values, *d_gate = torch.func.vjp(plain, *given)[1]((d_part, d_sigma))
            return d_query, d_key, *(d_gate or [None]), d_read, d_values, None, None, None
        d_query, d_gate, d_read, d_score, d_terms = _backward(
            d_part, d_sigma, key, gate, read, values, sigma, unit, scale, content, attention, *kept, ctx.heads
        )
        d_key = torch.bmm(d_score.flatten(2), unit.flatten(2).transpose(1, 2))
        d_values = attention[2].flatten(1) @ d_terms.flatten()
        return d_query, d_key, d_gate, d_read, d_values, None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        primals = ctx.saved_tensors[:5]
        plain, given = _plain(ctx, *primals)
        filled = [torch.zeros_like(p) if t is None and p is not None else t for p, t in zip(primals, tangents[:5], strict=True)]
        _, (d_part, d_sigma) = torch.func.jvp(plain, tuple(given), tuple(_plain(ctx, *filled)[1]))
        return d_part, d_sigma, *[None] * 10

    @staticmethod
    def vmap(info, in_dims, *args):
        return _fold(_Compose, info, in_dims, args, shared=(1, 4))


def _plain(ctx, query, key, gate, read, values):
    """The plain function of the tensors that are there, and those tensors."""

    def plain(query, key, read, values, gate=None):
        return functional.compose_rows(
            query, key, gate, read, values, ctx.heads, ctx.least_used, ctx.sharpness, _PAPER
        )

    return plain, [query, key, read, values] + ([] if gate is None else [gate])


def _backward(
    d_part, d_sigma, key, gate, read, values,
    sigma, unit, scale, content, attention, open_, least, usage, among, inner, terms, heads,
):
    """Gradients of query, gate and read, and of the scores and terms, from which key and values get theirs."""
    left, right, _ = attention.unbind(0)
    d_score = torch.empty_like(content)  # holds the gradient of attention first
    d_left, d_right, d_weights = d_score.unbind(0)
    d_outer = torch.mul(d_part[:, None], right, out=d_right).sum(0)
    torch.mul(d_part[:, None], inner * sigma, out=d_right)
    d_inner = d_outer * sigma
    d_read = torch.mul(left, d_inner, out=d_left).sum(1)
    torch.mul(read[:, None], d_inner, out=d_left)
    d_terms = torch.addcmul(d_sigma, d_outer, inner).cumsum(0).mul_(terms.sigmoid())
    torch.mul(values[:, None, None], d_terms, out=d_weights)
    if gate is None:
        d_gate = None
        d_score.mul_(content)
    else:
        shut = 1 - open_
        _recur_backward(d_score, shut, least, usage, among, heads)
        d_gate = torch.sub(content, least).mul_(d_score)
        if gate.shape[2] == 1:
            d_gate = d_gate.sum(2, keepdim=True)
        d_gate.mul_(open_).mul_(shut)
        d_score.mul_(content).mul_(open_)
    d_score.addcmul_(content, d_score.sum(1, keepdim=True), value=-1)
    d_unit = torch.bmm(key.transpose(1, 2), d_score.flatten(2)).view_as(unit)
    d_query = d_unit.addcmul_(unit, (unit * d_unit).sum(1, keepdim=True), value=-1).mul_(scale)
    return d_query, d_gate, d_read, d_score, d_terms


def _recur(content, open_, attention, least, usage, among, heads, least_used):
    """Eq. 12 to 14 over the steps, into `attention`, `least`, `usage` and `among` (1 for the slots least used)."""
    rounds = least_used <= _ROUNDS and content.is_cpu
    tensors = [t.split(heads, 2) for t in (content, open_.expand_as(content), attention, least, usage, among)]
    _recur_steps(tensors, least_used, rounds)
    if rounds and content.numel() and among[:, :, heads:].sum(1).amax() > least_used:
        _recur_steps(tensors, least_used, rounds=False)  # rounds of minima cannot tell equal usages apart


def _recur_steps(tensors, least_used, rounds):
    last_w = last_m = None
    rest = torch.empty_like(tensors[0][0])
    for c, g, w, l, m, a in zip(*tensors, strict=True):
        if last_w is None:
            torch.mul(c, g, out=w)
            l.zero_()
        else:
            m.copy_(last_w) if last_m is None else torch.maximum(last_m, last_w, out=m)
            if rounds:
                threshold, remaining = m.amin(1, keepdim=True), m
                for _ in range(least_used - 1):
                    torch.le(remaining, threshold, out=a)
                    remaining = torch.add(remaining, a, alpha=4.0, out=rest)  # attention is at most 1: out of the way
                    threshold = rest.amin(1, keepdim=True)
            else:
                threshold = m.topk(least_used, dim=1, largest=False, sorted=False).values.amax(1, keepdim=True)
            torch.le(m, threshold, out=a)
            torch.sub(m.amax(1, keepdim=True), m, out=l).mul_(a)
            torch.lerp(l, c, g, out=w)
            last_m = m
        last_w = w


def _recur_backward(d_attention, shut, least, usage, among, heads):
    """Add to the gradient of each step's attention what it did to later steps through the usage."""
    by_step = [t.split(heads, 2) for t in (d_attention, usage, among, shut.expand_as(d_attention))]
    later = None
    d_usage, one, two = d_attention.new_empty((3, *by_step[0][0].shape))
    d_usage.zero_()
    for d, m, a, s in reversed([*zip(*by_step, strict=True)][1:]):
        if later is not None:  # where this step's attention is the largest yet, it is the next step's usage
            torch.gt(later, m, out=one).mul_(d_usage)
            d_usage.sub_(one)
            d.add_(one)
        torch.mul(d, a, out=one).mul_(s)
        torch.eq(m, m.amax(1, keepdim=True), out=two).mul_(one.sum(1, keepdim=True))
        d_usage.add_(two.sub_(one))
        later = m
    by_step[0][0].add_(d_usage)


def _fold(function: type[torch.autograd.Function], info, in_dims, args, shared):
    """The vmap rule. Where arguments that rows share are mapped too, each of their members gets a call of its own."""
    if any(in_dims[place] is not None for place in shared):
        pairs = [*zip(args, in_dims, strict=True)]
        calls = [function.apply(*(arg if dim is None else arg.select(dim, i) for arg, dim in pairs))
                 for i in range(info.batch_size)]
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
