"""A Neural Turing Machine (A. Graves, G. Wayne and I. Danihelka, 2014): an LSTM with a memory, a read and a write head.

Shapes: B batch, T time steps, X in, O out, H hidden, N rows of the memory, W width of a row, Z interface; the 2 heads
are read and write, in this order; the 3 shifts are -1, 0 and 1. The memory is kept as (B, W, N): what runs over its
rows then runs over whole vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.functional import EPSILON
from neurocoder.precision import full_precision

TINY = 1e-16  # added to a weighting before its logarithm is taken
SCALARS = 12  # of both heads: strength, gate, three shifts, sharpening
TOGETHER = 8  # sequences that are left out at a time, once they are over: leaving out has a cost, too
FOCUS = 5.0  # how far the first row starts ahead of the others in the initial weightings


class State(NamedTuple):
    """All that a step leaves to the next."""

    hidden_BH: Tensor
    cell_BH: Tensor
    read_BW: Tensor
    memory_BWN: Tensor
    weight_B2N: Tensor


class TuringMachine(nn.Module):
    """From (B, T, inputs) to (B, T, outputs), one step after the other.

    The controller sees the input and what was last read. One layer, `interface`, maps its state to all that the heads
    need: a key each, what to erase and add, and the 12 numbers that address. Keys and what is added go through a tanh,
    the others through what bounds them in Graves et al.: see `access`. The output looks at the state and what was read.
    Where a sequence starts is learned.

    Args:
        hidden: units of the controller.
        rows, width: of the memory.
    """

    def __init__(self, inputs: int, outputs: int, hidden: int = 200, rows: int = 128, width: int = 20):
        super().__init__()
        self.controller = nn.LSTMCell(inputs + width, hidden)
        self.interface = nn.Linear(hidden, 4 * width + SCALARS)
        self.output = nn.Linear(hidden + width, outputs)
        self.hidden, self.cell = nn.Parameter(torch.zeros(hidden)), nn.Parameter(torch.zeros(hidden))
        self.read = nn.Parameter(torch.zeros(width))
        self.memory = nn.Parameter(torch.empty(width, rows))
        self.focus = nn.Parameter(torch.zeros(2, rows))  # logits of the weightings
        nn.init.uniform_(self.memory, -((rows + width) ** -0.5), (rows + width) ** -0.5)
        with torch.no_grad():
            self.focus[:, 0] = FOCUS

    def start(self, batch: int) -> State:
        """The state before the first step."""
        parts = (self.hidden, self.cell, self.read, self.memory, self.focus.softmax(-1))
        return State(*(part.expand(batch, *part.shape) for part in parts))

    def step(self, x_BX: Tensor, state: State) -> State:
        """One time step; what the output looks at is `hidden_BH` and `read_BW` of what it returns."""
        seen = torch.cat((x_BX, state.read_BW), -1)
        hidden_BH, cell_BH = self.controller(seen, (state.hidden_BH, state.cell_BH))
        return State(hidden_BH, cell_BH, *access(self.interface(hidden_BH), state.memory_BWN, state.weight_B2N))

    def forward(self, x_BTX: Tensor, length_B: Tensor | None = None) -> Tensor:
        """Where lengths are given, none above the one before it, what comes after the end of a sequence is undefined,
        and as good as not computed."""
        state, hidden, read = self.start(len(x_BTX)), [], []
        counts = [len(x_BTX)] * x_BTX.shape[1] if length_B is None else _going_on(length_B, x_BTX.shape[1])
        with nc.cached(self, unrolled=True):  # the programs of a re-coded interface are the same at every step
            for x_BX, count in zip(x_BTX.unbind(1), counts, strict=True):
                if count < len(state.read_BW):
                    state = State(*(part[:count] for part in state))
                state = self.step(x_BX[:count], state)
                hidden.append(state.hidden_BH)
                read.append(state.read_BW)
        seen_TBX = torch.cat([_stacked(part, len(x_BTX)) for part in (hidden, read)], -1)
        return self.output(seen_TBX).transpose(0, 1)


def _going_on(length_B: Tensor, steps: int) -> list[int]:
    """How many sequences to go on with at each step: those that are not over, and a few beside them."""
    if (length_B.diff() > 0).any():
        raise ValueError(
            "sequences with lengths must come longest first: sort them, e.g. by length.argsort(descending=True)"
        )
    alive_T = (length_B[:, None] > torch.arange(steps, device=length_B.device)).sum(0)
    return [min(max(-(-alive // TOGETHER), 1) * TOGETHER, len(length_B)) for alive in alive_T.tolist()]


def _stacked(parts: list[Tensor], batch: int) -> Tensor:
    """(T, B, ...) from a tensor a step, of ever fewer sequences. `pad_sequence` does so, too, and its backward copies
    the gradient of all steps once for each: a seventh of a training step."""
    return torch.stack([F.pad(part, (0, 0, 0, batch - len(part))) for part in parts])


def access(raw_BZ: Tensor, memory_BWN: Tensor, weight_B2N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both heads address the memory; one reads it, the other then writes: read (B, W), memory and weightings.

    With the letters of Graves et al., for each head, from its weighting w at the step before:

        w_c = softmax(beta K[k, M])             content (Eq. 5), K the cosine, k = tanh, beta = softplus of what is raw
        w_g = g w_c + (1 - g) w                 interpolation (Eq. 7), g = sigmoid
        w_s(i) = sum_j w_g(i - j) s(j)          circular shift by -1, 0 or 1 (Eq. 8), s = softmax
        w(i) = w_s(i)^gamma / sum_j w_s(j)^gamma                    sharpening (Eq. 9), gamma = 1 + softplus
        read = sum_i w_r(i) M(i)                (Eq. 2)
        M(i) <- M(i) (1 - w_w(i) e) + w_w(i) a  (Eq. 3, 4), e = sigmoid, a = tanh

    `raw_BZ` has keys, strengths, gates, shifts and sharpenings of both heads, then e and a of the one that writes.
    Gradients are written by hand: fewer passes over the memory, and no graph of forty small operations a step. They
    cannot be differentiated in turn.
    """
    with full_precision(memory_BWN):
        read_BW, memory_BWN, weight_B2N = _Access.apply(raw_BZ.to(memory_BWN.dtype), memory_BWN, weight_B2N)
        return read_BW, memory_BWN, weight_B2N


class _Signals(NamedTuple):
    """What the interface says, each part as it is used."""

    key_B2W: Tensor
    strength_B21: Tensor
    gate_B21: Tensor
    shift_B23: Tensor
    sharp_B21: Tensor
    erase_BW: Tensor
    add_BW: Tensor


def _parts(z_BZ: Tensor, width: int) -> _Signals:
    """Views of the interface vector, or of its gradient."""
    keys, strengths, gates, shifts, sharps, erase, add = z_BZ.split((2 * width, 2, 2, 6, 2, width, width), -1)
    return _Signals(
        keys.unflatten(-1, (2, width)),
        strengths.unsqueeze(-1),
        gates.unsqueeze(-1),
        shifts.unflatten(-1, (2, 3)),
        sharps.unsqueeze(-1),
        erase,
        add,
    )


def _windows(values_B2N: Tensor) -> list[Tensor]:
    """Every place's neighbour before it, itself, and the one behind it; the first follows the last."""
    count, around = values_B2N.shape[-1], torch.cat((values_B2N[..., -1:], values_B2N, values_B2N[..., :1]), -1)
    return [around.narrow(-1, place, count) for place in range(3)]


def _mixed(windows: list[Tensor], share_B23: Tensor) -> Tensor:
    first, second, third = share_B23.split(1, -1)
    return (windows[0] * first).addcmul_(windows[1], second).addcmul_(windows[2], third)


class _Access(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw_BZ: Tensor, memory_BWN: Tensor, before_B2N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raw = _parts(raw_BZ, memory_BWN.shape[1])
        key_B2W, add_BW, erase_BW = raw.key_B2W.tanh(), raw.add_BW.tanh(), raw.erase_BW.sigmoid()
        strength, gate, shift_B23 = F.softplus(raw.strength_B21), raw.gate_B21.sigmoid(), raw.shift_B23.softmax(-1)
        sharp = F.softplus(raw.sharp_B21).add_(1)

        scale_B2 = key_B2W.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
        unit_B2W = key_B2W * scale_B2
        length_B1N = memory_BWN.square().sum(1, keepdim=True).add_(EPSILON).rsqrt_()
        cosine_B2N = torch.bmm(unit_B2W, memory_BWN).mul_(length_B1N)
        content_B2N = (cosine_B2N * strength).softmax(-1)
        gated_B2N = torch.lerp(before_B2N, content_B2N, gate)
        shifted_B2N = _mixed(_windows(gated_B2N), shift_B23.flip(-1)).add_(TINY)
        log_B2N = shifted_B2N.log()
        weight_B2N = (log_B2N * sharp).softmax(-1)

        reading_B1N, writing_B1N = weight_B2N.split(1, 1)
        read_BW = torch.bmm(memory_BWN, reading_B1N.transpose(1, 2)).squeeze(-1)
        erased_BWN = torch.bmm(erase_BW[:, :, None], writing_B1N)
        written_BWN = torch.addcmul(memory_BWN, memory_BWN, erased_BWN, value=-1)
        written_BWN.baddbmm_(add_BW[:, :, None], writing_B1N)
        ctx.save_for_backward(
            raw_BZ, memory_BWN, before_B2N, key_B2W, add_BW, erase_BW, strength, gate, shift_B23, sharp, scale_B2,
            unit_B2W, length_B1N, cosine_B2N, content_B2N, gated_B2N, shifted_B2N, log_B2N, weight_B2N, erased_BWN,
        )  # fmt: skip
        return read_BW, written_BWN, weight_B2N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        with full_precision(d_outputs[0]):
            return _backward(ctx.saved_tensors, *d_outputs)


def _backward(
    saved: tuple[Tensor, ...], d_read_BW: Tensor, d_written_BWN: Tensor, d_weight_B2N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The equations of `_Access.forward`, last one first."""
    (
        raw_BZ, memory_BWN, before_B2N, key_B2W, add_BW, erase_BW, strength, gate, shift_B23, sharp, scale_B2,
        unit_B2W, length_B1N, cosine_B2N, content_B2N, gated_B2N, shifted_B2N, log_B2N, weight_B2N, erased_BWN,
    ) = saved  # fmt: skip
    raw, d_raw_BZ = _parts(raw_BZ, memory_BWN.shape[1]), torch.empty_like(raw_BZ)
    d_raw = _parts(d_raw_BZ, memory_BWN.shape[1])
    reading_B1N, writing_B1N = weight_B2N.split(1, 1)

    d_kept_BWN = d_written_BWN * memory_BWN
    d_add_BW, d_erase_BW = (torch.bmm(d, writing_B1N.transpose(1, 2)).squeeze(-1) for d in (d_written_BWN, d_kept_BWN))
    torch.addcmul(d_add_BW, d_add_BW, add_BW.square(), value=-1, out=d_raw.add_BW)
    d_raw.erase_BW.copy_(d_erase_BW.mul_(erase_BW).mul_(erase_BW - 1))
    d_writing_B1N = torch.bmm(add_BW[:, None], d_written_BWN).baddbmm_(erase_BW[:, None], d_kept_BWN, alpha=-1)
    d_reading_B1N = torch.bmm(d_read_BW[:, None], memory_BWN)
    d_weight_B2N = torch.cat((d_reading_B1N, d_writing_B1N), 1).add_(d_weight_B2N)

    d_power_B2N = _softmax_backward(d_weight_B2N, weight_B2N)
    torch.mul((d_power_B2N * log_B2N).sum(-1, keepdim=True), raw.sharp_B21.sigmoid(), out=d_raw.sharp_B21)
    d_shifted_B2N = d_power_B2N.mul_(sharp).div_(shifted_B2N)
    d_shift_B23 = torch.stack([(d_shifted_B2N * w).sum(-1) for w in reversed(_windows(gated_B2N))], -1)
    d_raw.shift_B23.copy_(_softmax_backward(d_shift_B23, shift_B23))
    d_gated_B2N = _mixed(_windows(d_shifted_B2N), shift_B23)

    d_gate = (d_gated_B2N * (content_B2N - before_B2N)).sum(-1, keepdim=True)
    torch.mul(d_gate.mul_(gate), 1 - gate, out=d_raw.gate_B21)
    d_content_B2N = d_gated_B2N * gate
    d_before_B2N = d_gated_B2N - d_content_B2N
    d_score_B2N = _softmax_backward(d_content_B2N, content_B2N)
    d_strength = (d_score_B2N * cosine_B2N).sum(-1, keepdim=True)
    torch.mul(d_strength, raw.strength_B21.sigmoid(), out=d_raw.strength_B21)
    d_cosine_B2N = d_score_B2N.mul_(strength)
    d_length_B1N = (d_cosine_B2N * cosine_B2N).sum(1, keepdim=True).mul_(length_B1N.square())
    d_dot_B2N = d_cosine_B2N.mul_(length_B1N)
    d_unit_B2W = torch.bmm(d_dot_B2N, memory_BWN.transpose(1, 2))
    d_key_B2W = d_unit_B2W.addcmul_(unit_B2W, (d_unit_B2W * unit_B2W).sum(-1, keepdim=True), value=-1)
    d_key_B2W.mul_(scale_B2)
    torch.addcmul(d_key_B2W, d_key_B2W, key_B2W.square(), value=-1, out=d_raw.key_B2W)

    d_memory_BWN = torch.addcmul(d_written_BWN, d_written_BWN, erased_BWN, value=-1)
    d_memory_BWN.addcmul_(memory_BWN, d_length_B1N, value=-1)
    d_memory_BWN.baddbmm_(
        torch.cat((d_read_BW[:, None], unit_B2W), 1).transpose(1, 2), torch.cat((reading_B1N, d_dot_B2N), 1)
    )
    return d_raw_BZ, d_memory_BWN, d_before_B2N


def _softmax_backward(d_share: Tensor, share: Tensor) -> Tensor:
    """Overwrites the gradient that it is given."""
    total = d_share.mul_(share).sum(-1, keepdim=True)
    return d_share.addcmul_(share, total, value=-1)
