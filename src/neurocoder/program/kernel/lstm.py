"""The LSTM of `functional.lstm` by hand, from a zero state, for `fused`: forward and backward in place.

On a CPU a tanh costs three times a sigmoid, so tanh(x) is taken as 2 sigmoid(2x) - 1, and the candidate's rows are
doubled beforehand to share one sigmoid with the gates. Here states come step first: (J, U, N).
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


def forward(signal_XN: Tensor, recurrent_XU: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, gates (J, 4, U, N), cells, and the tanh of the cells."""
    units, rows = recurrent_XU.shape[1], signal_XN.shape[1]
    doubled, recurrent = signal_XN.clone(), recurrent_XU.clone()
    doubled[3 * units :].mul_(2)
    recurrent[3 * units :].mul_(2)
    gates = signal_XN.new_empty(steps, 4, units, rows)
    states, cells, shown = (signal_XN.new_empty(steps, units, rows) for _ in range(3))
    last_state = last_cell = None
    for gate, state, cell, tanh in zip(*(t.unbind(0) for t in (gates, states, cells, shown)), strict=True):
        flat = gate.flatten(0, 1)
        flat.copy_(doubled) if last_state is None else torch.addmm(doubled, recurrent, last_state, out=flat)
        i, f, o, g = flat.sigmoid_().view_as(gate).unbind(0)
        torch.mul(i, g.mul_(2).sub_(1), out=cell)
        if last_cell is not None:
            cell.addcmul_(f, last_cell)
        torch.mul(cell, 2, out=tanh).sigmoid_().mul_(2).sub_(1)
        torch.mul(o, tanh, out=state)
        last_state, last_cell = state, cell
    return states, gates, cells, shown


def backward(
    d_query_MKJHN: Tensor, recurrent_XU: Tensor, states: Tensor, gates: Tensor, cells: Tensor, shown: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of signal and recurrent weights from that of the queries, the first rows of the states."""
    steps, _, units, rows = gates.shape
    d_states = torch.zeros_like(states)
    d_query_JMKHN = d_query_MKJHN.permute(2, 0, 1, 3, 4)
    d_states[:, : prod(d_query_JMKHN.shape[1:4])].view(d_query_JMKHN.shape).copy_(d_query_JMKHN)
    one = gates.new_ones(())
    slopes = torch.addcmul(gates, gates, gates, value=-1)  # of the sigmoids
    torch.addcmul(one, gates[:, 3], gates[:, 3], value=-1, out=slopes[:, 3])
    d_shown = torch.addcmul(one, shown, shown, value=-1).mul_(gates[:, 2])
    d_cell = torch.zeros_like(cells[0])
    back, later = recurrent_XU.t(), None
    by_step = [t.unbind(0) for t in (d_states, gates, slopes, d_shown, shown)]
    for j in reversed(range(steps)):
        d_state, gate, slope, d_tanh, tanh = (t[j] for t in by_step)
        i, f, _, g = gate.unbind(0)
        d_i, d_f, d_o, d_g = slope.unbind(0)
        if later is not None:
            d_state.addmm_(back, later)
        d_cell.addcmul_(d_state, d_tanh)
        d_o.mul_(d_state).mul_(tanh)
        d_i.mul_(d_cell).mul_(g)
        d_g.mul_(d_cell).mul_(i)
        d_f.mul_(d_cell).mul_(cells[j - 1]) if j else d_f.zero_()
        d_cell.mul_(f)
        later = slope.flatten(0, 1)
    d_signals = slopes.view(steps, 4 * units, rows)
    before = states[:-1].transpose(0, 1).flatten(1)
    return d_signals.sum(0), d_signals[1:].transpose(0, 1).flatten(1) @ before.t()
