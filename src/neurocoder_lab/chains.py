"""Sequences that chain algorithmic tasks (Table 4 of Neurocoder's later appendix), batches of them made at once.

A sequence is t_1, input of task 1, t_2, input of task 2, ..., a step that calls for the answers, then all outputs one
after the other, while the input is zero. A step is ten numbers: eight bits; a ninth that is 1 where the bits say what
comes (which task, or the call for the answers); and one for what is no bit: the number of repeats, a priority, or that
an item is the one asked for.

Shapes: B sequences, K tasks of one, Q = B * K tasks, L steps of one task, T of a sequence, X numbers of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ALGORITHMS = ("copy", "repeat copy", "associative recall", "priority sort")
BITS, SYMBOL, NUMBER, WIDTH = 8, 8, 9, 10  # how many bits; where the two other numbers of a step are; of how many
CALL = len(ALGORITHMS)  # the bit, and the phase, of the step that calls for the answers
ITEM, SORTED = 2, 2  # steps of an item to recall; items of a sort that are asked for

Range = tuple[int, int]


@dataclass(frozen=True)
class Ranges:
    """What is drawn evenly, both ends included; as in training unless said otherwise."""

    length: Range = (1, 3)
    repeats: Range = (1, 2)
    recalled: Range = (2, 3)
    sorted: Range = (3, 3)


class Chains(NamedTuple):
    """A batch, the longest sequence first. All start together; where one is over, its steps are zeros of phase -1.

    Attributes:
        x_BTX: what the network sees.
        y_BTX: the bits wanted, of eight, where there is something to answer.
        phase_BT: what a step is for: input of algorithm 0 to 3, 4: the call for answers, output of algorithm 0 to 3
            as 5 to 8.
    """

    x_BTX: Tensor
    y_BTX: Tensor
    phase_BT: Tensor


class _Tasks(NamedTuple):
    """Of one algorithm: inputs (Q, L, X) and outputs (Q, L, BITS), and which of their steps are there (Q, L)."""

    input_QLX: Tensor
    given_QL: Tensor
    output_QLX: Tensor
    wanted_QL: Tensor


def lengths(phase_BT: Tensor) -> Tensor:
    """Steps of each sequence."""
    return (phase_BT >= 0).sum(1)


def answers(phase_BT: Tensor) -> Tensor:
    """Which steps are to be answered: nothing else is looked at."""
    return phase_BT > CALL


def chains(
    count: int,
    tasks: int,
    ranges: Ranges = Ranges(),
    algorithm_BK: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Chains:
    """A batch of sequences of so many tasks, each of an algorithm drawn evenly unless `algorithm_BK` says which."""
    if algorithm_BK is None:
        algorithm_BK = torch.randint(len(ALGORITHMS), (count, tasks), generator=generator)
    draw = _Draw(count * tasks, generator)
    made = [make(draw, ranges) for make in (_copy, _repeat_copy, _recall, _sort)]
    which_Q = algorithm_BK.flatten()
    input_QLX, given_QL, output_QLX, wanted_QL = (
        _chosen(list(parts), which_Q).unflatten(0, (count, tasks)) for parts in zip(*made, strict=True)
    )  # from here on (B, K, L, ...)
    name_BK1X = F.one_hot(algorithm_BK, WIDTH)[:, :, None].float()
    name_BK1X[..., SYMBOL] = 1
    call_B1X = torch.zeros(count, 1, WIDTH)
    call_B1X[..., [CALL, SYMBOL]] = 1
    output = F.pad(output_QLX, (0, WIDTH - BITS)).flatten(1, 2)
    inputs = torch.cat((name_BK1X, input_QLX), 2).flatten(1, 2)
    there = (
        F.pad(given_QL, (1, 0), value=True).flatten(1),
        torch.ones(count, 1, dtype=torch.bool),
        wanted_QL.flatten(1),
    )
    phases = [algorithm_BK.repeat_interleave(len(part[0]) // tasks, 1) for part in (there[0], there[2])]
    phase = torch.cat((phases[0], torch.full((count, 1), CALL), phases[1] + CALL + 1), 1)
    x = torch.cat((inputs, call_B1X, torch.zeros_like(output)), 1)
    y = torch.cat((torch.zeros_like(inputs), torch.zeros_like(call_B1X), output), 1)[..., :BITS]
    return Chains(*_closed_up(torch.cat(there, 1), x, y, phase))


def _closed_up(there: Tensor, x: Tensor, y: Tensor, phase: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The steps that are there, in their order, moved to the front; what is left over is nothing. Longest first."""
    row = there.sum(1).argsort(descending=True, stable=True)
    there, x, y, phase = there[row], x[row], y[row], phase[row]
    longest = int(there[0].sum())
    order = torch.argsort(~there, dim=1, stable=True)[:, :longest]
    there = there.gather(1, order)
    x, y = (part.gather(1, order[..., None].expand(-1, -1, part.shape[-1])) * there[..., None] for part in (x, y))
    return x, y, phase.gather(1, order).masked_fill_(~there, -1)


def _chosen(parts: list[Tensor], which_Q: Tensor) -> Tensor:
    """Of one part of every algorithm (Q, L, ...), with zeros up to the longest L, that of each row's algorithm."""
    longest = max(part.shape[1] for part in parts)
    padded = [F.pad(part, (0, 0) * (part.dim() - 2) + (0, longest - part.shape[1])) for part in parts]
    return torch.stack(padded)[which_Q, torch.arange(len(which_Q))]


class _Draw:
    """Chance, for so many tasks."""

    def __init__(self, count: int, generator: torch.Generator | None):
        self.count, self.generator = count, generator

    def number(self, range_: Range) -> Tensor:
        """(Q, 1)"""
        return torch.randint(range_[0], range_[1] + 1, (self.count, 1), generator=self.generator)

    def up_to(self, highest_Q1: Tensor) -> Tensor:
        """Evenly from 0, the given number excluded, (Q, 1)."""
        return (self.real(1) * highest_Q1).long()

    def real(self, size: int) -> Tensor:
        """From 0 to 1, (Q, size)."""
        return torch.rand(self.count, size, generator=self.generator)

    def bits(self, size: int) -> Tensor:
        """(Q, size, BITS)"""
        return torch.randint(2, (self.count, size, BITS), generator=self.generator).float()


def _step(bits: Tensor, number: Tensor | None = None) -> Tensor:
    """Steps (Q, L, X) of bits, and of the number beside them (Q, L)."""
    steps = F.pad(bits, (0, WIDTH - BITS))
    if number is not None:
        steps[..., NUMBER] = number
    return steps


def _picked(rows_QLX: Tensor, place_QL: Tensor) -> Tensor:
    return rows_QLX.gather(1, place_QL[..., None].expand(-1, -1, rows_QLX.shape[-1]))


def _copy(draw: _Draw, ranges: Ranges) -> _Tasks:
    bits, length = draw.bits(ranges.length[1]), draw.number(ranges.length)
    there = torch.arange(ranges.length[1]) < length
    return _Tasks(_step(bits), there, bits, there)


def _repeat_copy(draw: _Draw, ranges: Ranges) -> _Tasks:
    """The number of repeats comes first, scaled as in training: 1 is -1, and 2 is 1."""
    bits, given, _, _ = _copy(draw, ranges)
    repeats, length = draw.number(ranges.repeats), given.sum(1, keepdim=True)
    first = _step(torch.zeros(draw.count, 1, BITS), 2.0 * repeats - 3)
    place = torch.arange(ranges.length[1] * ranges.repeats[1])
    again = _picked(bits[..., :BITS], place % length)
    return _Tasks(torch.cat((first, bits), 1), F.pad(given, (1, 0), value=True), again, place < length * repeats)


def _recall(draw: _Draw, ranges: Ranges) -> _Tasks:
    """Items, then one of them again, marked: the one that came after it is wanted."""
    items, most = draw.number(ranges.recalled), ranges.recalled[1]
    bits, asked, steps = draw.bits(most * ITEM), draw.up_to(items - 1), torch.arange(ITEM)
    query = _step(_picked(bits, asked * ITEM + steps), torch.ones(draw.count, ITEM))
    given = F.pad(torch.arange(most * ITEM) < items * ITEM, (0, ITEM), value=True)
    wanted = torch.ones(draw.count, ITEM, dtype=torch.bool)
    return _Tasks(torch.cat((_step(bits), query), 1), given, _picked(bits, (asked + 1) * ITEM + steps), wanted)


def _sort(draw: _Draw, ranges: Ranges) -> _Tasks:
    """Items, each with a priority between -1 and 1: those with the highest are wanted, the highest first."""
    items, most = draw.number(ranges.sorted), ranges.sorted[1]
    bits, priority, there = draw.bits(most), 2 * draw.real(most) - 1, torch.arange(most) < items
    first = priority.masked_fill(~there, -2).topk(SORTED, 1).indices
    return _Tasks(_step(bits, priority), there, _picked(bits, first), torch.ones(draw.count, SORTED, dtype=torch.bool))
