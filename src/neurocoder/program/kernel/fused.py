"""The hand-written twin of `functional.compose_rows`: fewer passes over memory, and its own backward.

It treats each row by itself, so a `vmap` over it only makes more rows: the rule folds the mapped dimension into the
rows. What the rows share (keys, singular terms) gets its gradient from ordinary operations. Second and forward-mode
derivatives go through the plain function.

Facts of PyTorch on a CPU that shape the code: a comparison is several times faster into a float than into a bool
(`out=`), a reduction runs over whole vectors if its dimension comes before the contiguous ones, and an operation on a
few thousand numbers costs more to call than to carry out. So the recursion works on one contiguous block a step,
slots first: (J, P, M, H, N), in the letters of `neurocoder.functional`. Without usage there is no recursion, components
need not know their steps, and it is (M, P, R, N).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.nn import functional as F

from neurocoder import functional
from neurocoder.functional import PAPER, Rules
from neurocoder.program.cached import watched
from neurocoder.program.kernel import lstm

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
    sharp_MPK: Tensor,
    gate: Tensor | None,
    read_PN: Tensor,
    values_P: Tensor,
    setting: Setting,
    rules: Rules,
) -> tuple[Tensor, Tensor]:
    """`functional.compose_rows`, by hand where the rules are the paper's; the compiler fuses the plain one itself.

    The signal is the queries, (M, K, R, N) or (M * K * R, N), or with recurrent weights (4U, U) that of the LSTM whose
    states they are.
    """
    compiling = torch.compiler.is_compiling()
    if gate is None and recurrent is None and rules.order == "ascending" and not compiling:
        # the same sum, with the components in the opposite order
        query = signal.reshape(3, sharp_MPK.shape[2], setting.steps * setting.heads, -1 if signal.numel() else 0).flip(
            2
        )
        part, sigma = compose_rows(query, None, sharp_MPK, None, read_PN, values_P, setting, PAPER)
        return part, sigma.flip(0)
    if compiling or not _as_in_the_paper(rules, gated=gate is not None):
        return _plain(signal, sharp_MPK, read_PN, values_P, gate, recurrent, setting=setting, rules=rules)
    # Without a derivative to take there is nothing to save. Under inference_mode, too, gradients are off.
    run = _Compose.apply if torch.is_grad_enabled() or watched() else _Compose.forward
    block = max(_BLOCK // (3 * len(values_P) * setting.heads), 1)
    if gate is None or read_PN.shape[1] <= block:
        return run(signal, recurrent, sharp_MPK, gate, read_PN, values_P, setting)[:2]
    blocks = zip(*(t.split(block, -1) for t in (signal, gate, read_PN)), strict=True)
    parts = [run(one, recurrent, sharp_MPK, gate, read, values_P, setting)[:2] for one, gate, read in blocks]
    part, sigma = (torch.cat(pieces, -1) for pieces in zip(*parts, strict=True))
    return part, sigma


def _as_in_the_paper(rules: Rules, gated: bool) -> bool:
    """Whether the rules that matter here are the paper's."""
    matter = _RULES if gated else ("order",)
    return rules is PAPER or all(getattr(rules, name) == getattr(PAPER, name) for name in matter)


def _plain(signal, sharp, read, values, gate=None, recurrent=None, *, setting: Setting, rules: Rules = PAPER):
    if recurrent is not None:
        query = functional.queries(functional.lstm(signal, recurrent, setting.steps), sharp.shape[2], setting.heads)
    else:
        query = signal if signal.dim() == 4 else signal.unflatten(0, (3, sharp.shape[2], -1))
    return functional.compose_rows(query, sharp, gate, read, values, setting.heads, setting.least_used, rules)


def infer(signal_XN: Tensor, sharp_MPK: Tensor, read_PN: Tensor, values_P: Tensor, setting: Setting) -> Tensor:
    """The transformed read (P, N) as `compose_rows` gives it for queries without gates, by the paper's rules: for rows
    that nobody differentiates or maps. The keys are sharpened for base two, whose powers cost half as much."""
    components, rows = setting.steps * setting.heads, read_PN.shape[1]
    query_MKX = signal_XN.view(3, sharp_MPK.shape[2], components * rows)
    score_MPRN = _score(query_MKX, sharp_MPK, (components, rows), setting.sharpness)[0]
    left, right, weights = _normalise(score_MPRN.exp2_()).unbind(0)
    inner_RN = left.mul_(read_PN[:, None]).sum(0)
    terms_RN = F.softplus(torch.matmul(values_P, weights.flatten(1)).view_as(inner_RN))
    sigma_RN = torch.mm(_ladder(components, terms_RN.dtype, terms_RN.device), terms_RN)
    return right.mul_(inner_RN.mul_(sigma_RN)).sum(1)


@cache
def _ladder(components: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Row n sums the terms n to R (Eq. 8)."""
    return torch.ones(components, components, dtype=dtype, device=device).triu_()


def _score(query: Tensor, sharp: Tensor, shape: tuple[int, int], sharpness: float) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 11 before its exponential, (M, P, *shape), the queries of unit length, and what made them so."""
    scale = query.square().sum(1, keepdim=True).add_(functional.EPSILON).rsqrt_()
    unit = query * scale if query.is_contiguous() else torch.mul(query, scale, out=query.new_empty(query.shape))
    score = torch.bmm(sharp, unit.flatten(2)).view(3, sharp.shape[1], *shape)
    return score if sharpness <= _SAFE else score.sub_(score.amax(1, keepdim=True)), unit, scale


def _normalise(content: Tensor) -> Tensor:
    return content.div_(content.sum(1, keepdim=True))


def _apply(left: Tensor, right: Tensor, weights: Tensor, read: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Part (P, N) and sigma (R, N) from attention (P, R, N) or, step by step, (J, P, H, N), and what lies between."""
    work = left * read[:, None]
    inner = work.sum(-3)
    terms = torch.matmul(values, weights.flatten(-2)).view_as(inner)
    sigma_RN = F.softplus(terms).flatten(0, -2).flip(0).cumsum(0).flip(0)
    outer = inner * sigma_RN.view_as(inner)
    return _over_steps(torch.mul(right, outer.unsqueeze(-3), out=work)).sum(1), sigma_RN, inner, terms


class _Compose(torch.autograd.Function):
    """Part (P, N) and sigma (R, N), then what backward needs."""

    @staticmethod
    def forward(signal, recurrent, sharp, gate, read, values, setting):
        rows, (steps, heads, least_used, sharpness) = read.shape[1], setting
        if recurrent is None:
            query, remembered = signal.reshape(3, sharp.shape[2], steps * heads * rows), (None,) * 4
        else:
            remembered = lstm.forward(signal, recurrent, steps)
            query = remembered[0][:, : 3 * sharp.shape[2] * heads].unflatten(1, (3, -1, heads)).permute(1, 2, 0, 3, 4)
        score_MPRN, unit, scale = _score(query, sharp, (steps * heads, rows), sharpness)
        if gate is None:
            content, recursion = _normalise(score_MPRN.exp_()), (None,) * 5
            attention = content.unbind(0)
        else:  # the recursion wants its steps in one piece each
            score_JPMHN = score_MPRN.unflatten(2, (steps, heads)).permute(2, 1, 0, 3, 4)
            content = torch.exp(score_JPMHN, out=score_MPRN.new_empty(score_JPMHN.shape))
            del score_MPRN, score_JPMHN  # what is freed here is written next, while it is in the cache
            content, open_ = _normalise(content), _by_step(gate, heads).sigmoid().contiguous()
            recursion = _recur(content, open_, least_used)
            attention, recursion = recursion[0].unbind(2), (recursion[0], open_, *recursion[1:])
        part_PN, sigma_RN, inner, terms = _apply(*attention, read, values)
        return part_PN, sigma_RN, unit, scale, content, inner, terms, *recursion, *remembered

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.setting = inputs
        ctx.mark_non_differentiable(*(kept for kept in output[2:] if kept is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        d_part, d_sigma = grads[:2]
        signal, recurrent, sharp, gate, read, values, sigma, *kept = ctx.saved_tensors
        d_part = torch.zeros_like(read) if d_part is None else d_part
        d_sigma = torch.zeros_like(sigma) if d_sigma is None else d_sigma
        if torch.is_grad_enabled() or is_legacy_batchedtensor(d_part):  # to be differentiated in turn, or batched
            plain, given, order = _differentiable(ctx)
            found = dict(zip(order, torch.func.vjp(plain, *given)[1]((d_part, d_sigma)), strict=True))
            return *(found.get(place) for place in range(6)), None
        with functional.full_precision(d_part):
            d_query, *found = _backward(d_part, d_sigma, sharp, gate, read, values, sigma, *kept[:10])
            if recurrent is None:
                return d_query.view_as(signal), None, *found, None
            by_step = d_query.view(3, sharp.shape[2], ctx.setting.steps, ctx.setting.heads, -1)
            return *lstm.backward(by_step, recurrent, *kept[10:]), *found, None

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
    names = {0: "signal", 2: "sharp", 4: "read", 5: "values", 3: "gate", 1: "recurrent"}

    def plain(*given):
        return _plain(**{names[place]: tensor for place, tensor in zip(order, given, strict=True)}, setting=ctx.setting)

    return plain, [tensors[place] for place in order], order


def _over_steps(x: Tensor) -> Tensor:
    """The sum over steps, (J, P, H, N), where there are any."""
    return x.sum(0) if x.dim() == 4 else x


def _through_unit(d_unit: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    return d_unit.addcmul_(unit, (unit * d_unit).sum(1, keepdim=True), value=-1).mul_(scale)


def _by_step(gate_MPRN: Tensor, heads: int) -> Tensor:
    """Gates as (J or 1, P, M, H, N)."""
    gate_JPMHN = gate_MPRN.transpose(0, 1).unflatten(2, (-1, heads if gate_MPRN.shape[2] > 1 else 1)).movedim(2, 0)
    return gate_JPMHN.expand(-1, -1, -1, heads, -1)


def _backward(
    d_part, d_sigma, sharp, gate, read, values, sigma, unit, scale, content, inner, terms, attention, open_, usage,
    least, top,
):  # fmt: skip
    """Gradients of query (M, K, ...), sharp keys, gate, read and values."""
    bank = 0 if gate is None else 2  # the dimension of the three
    left, right, weights = (content if gate is None else attention).unbind(bank)
    d_attention = torch.empty_like(content)
    d_left, d_right, d_weights = d_attention.unbind(bank)
    sigma = sigma.view_as(inner)
    d_outer = torch.mul(right, d_part[:, None], out=d_right).sum(-3)
    torch.mul(d_part[:, None], (inner * sigma).unsqueeze(-3), out=d_right)
    d_inner = d_outer * sigma
    d_read = _over_steps(torch.mul(left, d_inner.unsqueeze(-3), out=d_left)).sum(1)
    torch.mul(read[:, None], d_inner.unsqueeze(-3), out=d_left)
    d_terms = torch.addcmul(d_sigma.view_as(inner), d_outer, inner).flatten(0, -2).cumsum(0).view_as(inner)
    d_terms.mul_(terms.sigmoid())
    d_values = _over_steps(torch.mul(weights, d_terms.unsqueeze(-3), out=d_weights)).sum((1, 2))
    torch.mul(values[:, None, None], d_terms.unsqueeze(-3), out=d_weights)

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
        d_score = d_attention.addcmul_(content, correction, value=-1)
    else:
        d_score = content.new_empty(content.permute(2, 1, 0, 3, 4).shape)
        torch.addcmul(d_attention, content, correction, value=-1, out=d_score.permute(2, 1, 0, 3, 4))
    d_score_MPX = d_score.flatten(2)
    d_unit = torch.bmm(sharp.transpose(1, 2), d_score_MPX).view_as(unit)
    d_sharp = torch.bmm(d_score_MPX, unit.flatten(2).transpose(1, 2))
    return _through_unit(d_unit, unit, scale), d_sharp, d_gate, d_read, d_values


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
        outputs = tuple(None if outs[0] is None else torch.stack(outs) for outs in zip(*calls, strict=True))
        return outputs, tuple(None if out is None else 0 for out in outputs)
    folded = []
    for place, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
        if isinstance(arg, Tensor) and place not in shared:
            arg = arg.unsqueeze(0) if dim is None else arg.movedim(dim, 0)
            arg = arg.expand(info.batch_size, *arg.shape[1:]).movedim(0, -2).flatten(-2)
        folded.append(arg)
    outputs = function.apply(*folded)
    outputs = tuple(None if out is None else out.unflatten(-1, (info.batch_size, -1)) for out in outputs)
    return outputs, tuple(None if out is None else out.dim() - 2 for out in outputs)
