"""Attention to the slots that earlier steps used least (Eq. 12 to 14): a recursion over the steps, by hand.

Every tensor of a step is (P, M, H, N), in one piece; see `equations` for the letters and the reasons.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_ROUNDS = 8  # up to so many least-used slots, rounds of minima are faster than a selection


class Steps(NamedTuple):
    """The recursion. What usage gives begins with the second step: in the first there is none."""

    attention_JPMHN: Tensor
    usage: Tensor  # Eq. 12
    least: Tensor  # Eq. 13
    top: Tensor  # its max(m), without slots


class Scratch(NamedTuple):
    """What a step writes to and nobody reads afterwards."""

    remaining: Tensor
    chosen: Tensor


def opened(gate_MPRN: Tensor, heads: int) -> Tensor:
    """Open gates (J, P, M, H, N); J is 1 where steps share them, as they do with a gate (M, P, 1, N)."""
    own = heads if gate_MPRN.shape[2] > 1 else 1
    open_JPMHN = gate_MPRN.sigmoid().transpose(0, 1).unflatten(2, (-1, own)).movedim(2, 0)
    return open_JPMHN.expand(-1, -1, -1, heads, -1).contiguous()


def opened_backward(d_open: Tensor, open_JPMHN: Tensor, shut: Tensor, shared: bool) -> Tensor:
    d_gate = d_open.mul_(open_JPMHN).mul_(shut)
    if shared:
        return d_gate[0].sum(2, keepdim=True).transpose(0, 1)
    return d_gate.movedim(0, 2).flatten(2, 3).transpose(0, 1)


def attend(content_JPMHN: Tensor, open_JPMHN: Tensor, least_used: int) -> Steps:
    """Each step mixes content attention with attention to the slots that earlier steps used least."""
    first, later = content_JPMHN[0], content_JPMHN[1:]
    attention, usage, least = torch.empty_like(content_JPMHN), torch.empty_like(later), torch.empty_like(later)
    top = first.new_empty(len(later), *first.shape[1:])
    scratch = Scratch(torch.empty_like(first), torch.empty_like(first))
    open_ = open_JPMHN.expand_as(content_JPMHN)
    w_before, m_before = torch.mul(first, open_[0], out=attention[0]), None
    for c, g, w, m, l, high in _by_step(later, open_[1:], attention[1:], usage, least, top):
        m.copy_(w_before) if m_before is None else torch.maximum(w_before, m_before, out=m)  # Eq. 12
        _least_used_attention(m, least_used, scratch, top=high, out=l)
        torch.lerp(l, c, g, out=w)  # Eq. 14
        w_before, m_before = w, m
    return Steps(attention, usage, least, top)


def attend_backward(d_attention: Tensor, content_JPMHN: Tensor, shut_JPMHN: Tensor, steps: Steps) -> Tensor:
    """Adds to each step's gradient what its attention did to later steps; returns the gradient of the open gates."""
    d_open = torch.zeros_like(shut_JPMHN)
    one, two, d_usage = content_JPMHN.new_empty((3, *content_JPMHN.shape[1:]))
    d_usage.zero_()
    by_step = (d_attention, content_JPMHN, shut_JPMHN.expand_as(content_JPMHN), d_open.expand_as(content_JPMHN))
    m_next = None
    for d_w, c, s, d_g, m, l, high in reversed([*_by_step(*(t[1:] for t in by_step), *steps[1:])]):
        if m_next is not None:  # Eq. 12: where this step's attention is the largest yet, it is the next step's usage
            torch.gt(m_next, m, out=one).mul_(d_usage)
            d_usage.sub_(one)
            d_w.add_(one)
        d_l = torch.gt(l, 0, out=one).mul_(d_w).mul_(s)  # Eq. 14
        torch.eq(m, high, out=two)
        d_usage.sub_(d_l).addcmul_(two, d_l.sum(0).div_(two.sum(0)))  # Eq. 13: equal maxima share the gradient
        d_g.addcmul_(torch.sub(c, l, out=one), d_w)
        m_next = m
    d_first = d_attention[0].add_(d_usage)
    d_open[0].addcmul_(content_JPMHN[0], d_first)
    return d_open


def _by_step(*tensors: Tensor):
    return zip(*(tensor.unbind(0) for tensor in tensors), strict=True)


def _least_used_attention(usage: Tensor, count: int, scratch: Scratch, top: Tensor, out: Tensor) -> None:
    """Eq. 13: max(m) - m for the `count` slots of the smallest usage m, 0 for the others."""
    _choose_least_used(usage, count, scratch)
    torch.sub(torch.amax(usage, 0, out=top), usage, out=out).mul_(scratch.chosen)


def _choose_least_used(usage: Tensor, count: int, scratch: Scratch) -> None:
    """`chosen` becomes 1 for the slots whose usage is at most the `count`-th smallest, 0 for the others."""
    remaining, chosen = scratch
    if count <= _ROUNDS and usage.is_cpu:
        threshold, candidates = usage.amin(0), usage
        for _ in range(count - 1):
            torch.le(candidates, threshold, out=chosen)
            candidates = torch.add(candidates, chosen, alpha=4.0, out=remaining)  # attention is at most 1
            threshold = candidates.amin(0)
        torch.le(usage, threshold, out=chosen)
        if chosen.sum().item() <= count * threshold.numel():
            return
        # Some usages are equal, and rounds of minima count those as one.
    threshold = usage.topk(count, dim=0, largest=False, sorted=False).values.amax(0)
    torch.le(usage, threshold, out=chosen)
