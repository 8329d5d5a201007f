"""Reading a few rows of a memory for each input, by gathering them: the cost does not depend on how many there are.

`plain` has the equations; `compose_rows` is the same by hand, with a backward of its own: fewer passes over the rows,
few small operations, and gradients of the rows that were read, each once.

Shapes: see `neurocoder.functional`; k slots that a component reads, S = k * R of them for each of N rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.functional import add_up
from neurocoder.precision import full_precision, in_memory
from neurocoder.program.kept import plainly
from neurocoder.program.kernel.equations import ladder

_BLOCK = 2**17  # numbers gathered at a time: what the cache of a CPU holds


class Gathering(NamedTuple):
    """What is no tensor."""

    order: str  # of the singular values
    sparse: bool  # gradients of banks


class Slots:
    """The slots that each component of a row reads, and who reads each slot: found out once, however many ask.

    Args:
        slot_kRN: their numbers.
    """

    def __init__(self, slot_kRN: Tensor):
        self.slot_kRN = slot_kRN
        self.slot_NS = slot_kRN.flatten(0, 1).t().contiguous()

    @cached_property
    def readers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The slots that anybody reads, in order; where the readers of each begin in the list of all, and where those
        of the last end; that list; and which place of `slot_NS` each of it was."""
        at, order = self.slot_NS.flatten().sort()
        rows, counts = torch.unique_consecutive(at, return_counts=True)
        return rows, F.pad(counts.cumsum(0), (1, 0)), order // max(1, self.slot_NS.shape[1]), order

    def gradient(self, values: Tensor, table: Tensor) -> Tensor:
        """The sparse gradient of a table with one row a slot, from that of the rows that anybody reads."""
        return torch.sparse_coo_tensor(
            self.readers[0][None], values, table.shape, check_invariants=False, is_coalesced=True
        )


def compose_rows(
    x_NI: Tensor,
    weight_MkRN: Tensor,
    banks: tuple[Tensor, Tensor, Tensor],
    gain: Tensor,
    slots: list[Slots],
    setting: Gathering,
) -> tuple[Tensor, Tensor]:
    """What a program of its own makes of each row, (N, O), and its singular values (R, N).

    Args:
        weight_MkRN: of the slots that are read.
        banks: left (P, I), right (P, O) and values (P, 1).
        gain: a number that the output is multiplied by; it has no gradient.
        slots: that are read, for each bank, or one for all, as there are weights.
    """
    if plainly() or any(tensor.dtype != x_NI.dtype for tensor in banks):
        return plain(x_NI, weight_MkRN, banks, gain, slots, setting)
    y_NO, sigma_RN = _Compose.apply(x_NI, weight_MkRN, *banks, gain, slots, setting)  # pyright: ignore
    return y_NO, sigma_RN


def plain(
    x_NI: Tensor,
    weight_MkRN: Tensor,
    banks: tuple[Tensor, Tensor, Tensor],
    gain: Tensor,
    slots: list[Slots],
    setting: Gathering,
) -> tuple[Tensor, Tensor]:
    """The equations: sparse gradients only where nobody compiles or maps."""
    dtype, sparse = weight_MkRN.dtype, setting.sparse and not plainly()
    left, right, values = (
        (F.embedding(own.slot_kRN, bank, sparse=sparse).to(dtype) * weight_kRN[..., None]).sum(0)
        for own, bank, weight_kRN in zip(_each(slots), banks, _each([*weight_MkRN]), strict=True)
    )  # vectors of each component, (R, N, ...)
    sigma_RN = add_up(values[..., 0], setting.order)
    inner_RN = (left * x_NI).sum(-1)
    return ((inner_RN * sigma_RN)[..., None] * right).sum(0) * gain, sigma_RN


def _each(parts: list) -> list:
    """One for each of the three banks, where there is one for all."""
    return parts * 3 if len(parts) == 1 else parts


class _Compose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NI, weight_MkRN, left_PI, right_PO, column_P1, gain, slots, setting):
        ctx.slots, ctx.setting = slots, setting
        ctx.set_materialize_grads(False)
        (left, right, value), (w, v, s) = _each(slots), _each([*weight_MkRN])
        held_kRN = column_P1[:, 0][value.slot_kRN]
        attended_RN = (held_kRN * s).sum(0)
        sigma_RN = ladder(attended_RN, setting.order) @ F.softplus(attended_RN)
        read_kRN = _products(x_NI, left_PI, left.slot_NS).t().reshape(w.shape)
        inner_RN = (read_kRN * w).sum(0)
        scaled_RN = inner_RN * sigma_RN * gain
        part_NS = _rowwise(scaled_RN * v)
        y_NO = _sums(right.slot_NS, right_PO, part_NS)
        ctx.save_for_backward(
            x_NI, weight_MkRN, left_PI, right_PO, column_P1, gain, held_kRN, attended_RN, sigma_RN, read_kRN, inner_RN,
            part_NS,
        )  # fmt: skip
        return y_NO, sigma_RN

    @staticmethod
    def backward(ctx, *d_outputs):
        d_y_NO, d_sigma_RN = d_outputs
        saved, slots, setting = ctx.saved_tensors, ctx.slots, ctx.setting
        x_NI, _, _, right_PO, _, _, _, _, sigma_RN, *_ = saved
        if d_y_NO is None:
            d_y_NO = x_NI.new_zeros(len(x_NI), right_PO.shape[1])
        if twice(d_y_NO):
            d_sigma_RN = torch.zeros_like(sigma_RN) if d_sigma_RN is None else d_sigma_RN
            dense = setting._replace(sparse=False)

            def run(x_NI, weight_MkRN, left_PI, right_PO, column_P1, gain):
                return plain(x_NI, weight_MkRN, (left_PI, right_PO, column_P1), gain, slots, dense)

            return *differentiable(run, saved[:6], (d_y_NO, d_sigma_RN)), None, None
        with full_precision(d_y_NO):
            return *_backward(d_y_NO, d_sigma_RN, saved, slots, setting, ctx.needs_input_grad), None, None, None


def _backward(
    d_y_NO: Tensor, d_sigma_RN: Tensor | None, saved: tuple[Tensor, ...], slots: list[Slots], setting: Gathering,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of `x_NI`, the weights and the three banks."""
    x_NI, weight_MkRN, left_PI, right_PO, column_P1, gain = saved[:6]
    held_kRN, attended_RN, sigma_RN, read_kRN, inner_RN, part_NS = saved[6:]
    (left, right, value), (w, v, s) = _each(slots), _each([*weight_MkRN])
    d_part_kRN = _products(d_y_NO, right_PO, right.slot_NS).t().reshape(v.shape).mul_(gain)
    d_both_RN = (d_part_kRN * v).sum(0)
    d_inner_RN, through = d_both_RN * sigma_RN, d_both_RN * inner_RN
    d_read_NS = _rowwise(d_inner_RN * w)
    for_left, for_right = _room(x_NI, left, d_y_NO, right)
    d_left = _outer(d_read_NS, x_NI, left_PI, left, for_left, setting.sparse) if needed[2] else None
    d_right = _outer(part_NS, d_y_NO, right_PO, right, for_right, setting.sparse) if needed[3] else None
    d_x = _sums(left.slot_NS, left_PI, d_read_NS) if needed[0] else None
    d_all_RN = through if d_sigma_RN is None else through.add_(d_sigma_RN)
    d_attended_RN = (ladder(attended_RN, setting.order).t() @ d_all_RN).mul_(attended_RN.sigmoid())
    d_column = _column(d_attended_RN * s, column_P1, value, setting.sparse) if needed[4] else None
    d_weight = None
    if needed[1]:
        d_w, d_s = d_inner_RN * read_kRN, d_attended_RN * held_kRN
        d_v = d_part_kRN.mul_(inner_RN * sigma_RN)
        d_weight = d_w.add_(d_v).add_(d_s)[None] if len(weight_MkRN) == 1 else torch.stack((d_w, d_v, d_s))
    return d_x, d_weight, d_left, d_right, d_column


def twice(d_output: Tensor) -> bool:
    """Whether gradients are to be differentiated in turn, or stand for a batch of others: then they go plainly."""
    return torch.is_grad_enabled() or not in_memory(d_output)


def differentiable(
    run: Callable[..., Any], inputs: Sequence[Tensor], d_outputs: tuple[Tensor, ...]
) -> list[Tensor | None]:
    """Gradients of the inputs of `run` that can be differentiated in turn; by what it makes of them alone, though they
    may have been made of each other."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [tensor.view_as(tensor) for tensor in inputs]
        outputs = run(*own)
    wanted = [tensor for tensor in own if tensor.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, d_outputs, create_graph=again, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in own]


def _products(x_NI: Tensor, bank_PI: Tensor, slot_NS: Tensor) -> Tensor:
    """The product of each row with its rows of the bank, (N, S). Where PyTorch can, as a product of which only some
    entries are computed; else by gathering as many rows at a time as the cache holds."""
    count, each = slot_NS.shape
    if x_NI.is_cpu and count and 0 < each <= len(bank_PI) and _multiplies_sparse():
        starts = torch.arange(0, count * each + 1, each)
        wanted = torch.sparse_csr_tensor(
            starts, slot_NS.flatten(), x_NI.new_zeros(count * each), (count, len(bank_PI)), check_invariants=False
        )
        return torch.sparse.sampled_addmm(wanted, x_NI, bank_PI.t(), beta=0.0).values().view(count, each)
    some = max(1, _BLOCK // max(1, each * bank_PI.shape[1]))
    buffer = bank_PI.new_empty(min(some, count) * each, bank_PI.shape[1])
    product_NS = torch.empty(slot_NS.shape, dtype=bank_PI.dtype, device=bank_PI.device)
    for at in range(0, count, some):
        part = slot_NS[at : at + some]
        held = torch.index_select(bank_PI, 0, part.flatten(), out=buffer[: part.numel()]).unflatten(0, part.shape)
        torch.sum(held.mul_(x_NI[at : at + some, None]), -1, out=product_NS[at : at + some])
    return product_NS


@cache
def _multiplies_sparse() -> bool:
    """Whether this build has products of sparse matrices, and computes some entries of one by themselves. Asked once:
    the first tensor of this layout in a process warns that it is in beta."""
    if not torch.backends.mkl.is_available():
        return False
    with warnings.catch_warnings(action="ignore"):
        wanted = torch.sparse_csr_tensor(torch.arange(2), torch.zeros(1, dtype=torch.long), torch.zeros(1), (1, 1))
        try:
            torch.sparse.sampled_addmm(wanted, torch.ones(1, 1), torch.ones(1, 1), beta=0.0)
        except RuntimeError:
            return False
    return True


def _sums(rows: Tensor, table: Tensor, weights: Tensor) -> Tensor:
    """Sums of rows of the table by their weights; detached, since there is no derivative to take."""
    return F.embedding_bag(rows, table.detach(), per_sample_weights=weights.detach(), mode="sum")


def _rowwise(part_kRN: Tensor) -> Tensor:
    """In the order of `Slots.slot_NS`: (N, S)."""
    return part_kRN.flatten(0, 1).t().contiguous()


def _room(x_NI: Tensor, left: Slots, d_y_NO: Tensor, right: Slots) -> tuple[Tensor, Tensor]:
    """Where the gradients of the rows of both banks go, in one piece: glibc gives memory back to the system, which
    clears and maps it anew at the next step, once twice as much is free as the largest piece had."""
    shapes = [(len(slots.readers[0]), x.shape[1]) for slots, x in ((left, x_NI), (right, d_y_NO))]
    whole = x_NI.new_empty(sum(rows * width for rows, width in shapes))
    first, second = whole.split([rows * width for rows, width in shapes])
    return first.view(shapes[0]), second.view(shapes[1])


def _outer(weight_NS: Tensor, x_NI: Tensor, bank_PI: Tensor, slots: Slots, room: Tensor, sparse: bool) -> Tensor:
    """The gradient of a bank: what each row was weighed by, times what it met, added up over those that read it."""
    rows, bounds, readers, order = slots.readers
    weights = weight_NS.flatten()[order]
    if x_NI.is_cpu and len(rows) and _multiplies_sparse():
        each = torch.sparse_csr_tensor(bounds, readers, weights, (len(rows), len(x_NI)), check_invariants=False)
        torch.addmm(room, each, x_NI, beta=0.0, out=room)
    else:
        room.copy_(
            F.embedding_bag(readers, x_NI, bounds, per_sample_weights=weights, mode="sum", include_last_offset=True)
        )
    return slots.gradient(room, bank_PI) if sparse else torch.zeros_like(bank_PI).index_copy_(0, rows, room)


def _column(d_kRN: Tensor, column_P1: Tensor, slots: Slots, sparse: bool) -> Tensor:
    """The gradient of a table with one number a slot, from that of what was read."""
    if not sparse:
        return torch.zeros_like(column_P1).index_add_(0, slots.slot_kRN.flatten(), d_kRN.flatten()[:, None])
    one_N1, room = d_kRN.new_ones(d_kRN.shape[-1], 1), d_kRN.new_empty(len(slots.readers[0]), 1)
    return _outer(_rowwise(d_kRN), one_N1, column_P1, slots, room, sparse)
