"""Reading a few rows of a memory for each input, by gathering them: the cost does not depend on how many there are.

`plain` has the equations; `compose_rows` is the same by hand, with a backward of its own: fewer passes over the rows,
few small operations, and gradients of the rows that were read, each once.

Shapes: see `neurocoder.functional`; k slots that a component reads, S = R * k of them for each of N rows; a key has H
parts, two where it is a product, each of length K; T rows of a table of such parts.
"""

from __future__ import annotations

import warnings
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.functional import EPSILON, add_up, sharpen
from neurocoder.program.kept import plainly

_BLOCK = 2**17  # numbers gathered at a time: what the cache of a CPU holds


class Setting(NamedTuple):
    """What is no tensor."""

    sharpness: float
    order: str  # of the singular values
    sparse: bool  # gradients of banks
    sparse_keys: bool


class Slots:
    """The slots that each component of a row reads, and who reads each slot: found out once, however many ask.

    Args:
        slot_NRk: their numbers.
        place_NRkH: the rows of the table of keys that their keys are made of.
    """

    def __init__(self, slot_NRk: Tensor, place_NRkH: Tensor):
        self.slot_NRk, self.place_NRkH = slot_NRk, place_NRkH
        self.slot_NS = slot_NRk.flatten(1)

    @cached_property
    def readers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The slots that anybody reads, in order; where the readers of each start in the list of all; that list; and
        which place of `slot_NS` each of it was."""
        at, order = self.slot_NS.flatten().sort()
        rows, counts = torch.unique_consecutive(at, return_counts=True)
        return rows, counts.cumsum(0) - counts, order // max(1, self.slot_NS.shape[1]), order


def compose_rows(
    x_NI: Tensor,
    query_MNRHK: Tensor,
    banks: tuple[Tensor, Tensor, Tensor],
    tables: list[Tensor],
    slots: list[Slots],
    setting: Setting,
) -> tuple[Tensor, Tensor]:
    """What a program of its own makes of each row, (N, O), and its singular values (N, R).

    Args:
        banks: left (P, I), right (P, O) and values (P, 1).
        tables: of keys, (T, K), one for each bank, or one for all.
        slots: that are read, as many.
    """
    if plainly() or any(tensor.dtype != x_NI.dtype for tensor in (*banks, *tables)):
        return plain(x_NI, query_MNRHK, banks, tables, slots, setting)
    y_NO, sigma_NR = _Compose.apply(x_NI, query_MNRHK, *banks, slots, setting, *tables)  # pyright: ignore
    return y_NO, sigma_NR


def plain(
    x_NI: Tensor,
    query_MNRHK: Tensor,
    banks: tuple[Tensor, Tensor, Tensor],
    tables: list[Tensor],
    slots: list[Slots],
    setting: Setting,
) -> tuple[Tensor, Tensor]:
    """The equations: sparse gradients only where nobody compiles or maps."""
    dtype, sparse = query_MNRHK.dtype, setting.sparse and not plainly()
    weights = []
    for query_NRHK, table, own in zip(query_MNRHK, tables, slots, strict=True):
        key = F.embedding(own.place_NRkH, table, sparse=setting.sparse_keys and not plainly()).to(dtype)
        unit = sharpen(query_NRHK, 1.0)[:, :, None]
        weights.append((sharpen(key, setting.sharpness / key.shape[-2]) * unit).sum((-1, -2)).softmax(-1))
    left, right, values = (
        (F.embedding(own.slot_NRk, bank, sparse=sparse).to(dtype) * weight_NRk[..., None]).sum(2)
        for own, bank, weight_NRk in zip(_each(slots), banks, _each(weights), strict=True)
    )  # vectors of each component, (N, R, ...)
    sigma_NR = add_up(values[..., 0].t(), setting.order).t()
    inner_NR = (left * x_NI[:, None]).sum(-1)
    return ((inner_NR * sigma_NR)[..., None] * right).sum(1), sigma_NR


def _each(parts: list) -> list:
    """One for each of the three banks, where there is one for all."""
    return parts * 3 if len(parts) == 1 else parts


class _Compose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_NI, query_MNRHK, left_PI, right_PO, column_P1, slots, setting, *tables):
        ctx.slots, ctx.setting = slots, setting
        scale = query_MNRHK.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
        unit = query_MNRHK * scale
        key = torch.stack([F.embedding(own.place_NRkH, table) for own, table in zip(slots, tables, strict=True)])
        length = key.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
        way = key.mul_(length)  # (M, N, R, k, H, K)
        cosine_MNRk = (way * unit[:, :, :, None]).sum((-1, -2))
        weight_MNRk = cosine_MNRk.mul_(setting.sharpness / way.shape[-2]).softmax(-1)
        (left, right, value), (w, v, s) = _each(slots), _each([*weight_MNRk])
        held_NRk = F.embedding(value.slot_NRk, column_P1)[..., 0]
        attended_NR = (held_NRk * s).sum(-1)
        ladder_RR = _ladder(attended_NR.shape[1], setting.order, attended_NR.dtype, attended_NR.device)
        sigma_NR = F.softplus(attended_NR) @ ladder_RR
        read_NRk = _products(x_NI, left_PI, left.slot_NS).view_as(w)
        inner_NR = (read_NRk * w).sum(-1)
        part_NRk = (inner_NR * sigma_NR)[..., None] * v
        y_NO = _sums(right.slot_NS, right_PO, part_NRk.flatten(1))
        ctx.save_for_backward(
            x_NI, query_MNRHK, left_PI, right_PO, column_P1, *tables, scale, unit, length, way, weight_MNRk, held_NRk,
            attended_NR, sigma_NR, read_NRk, inner_NR, part_NRk,
        )  # fmt: skip
        return y_NO, sigma_NR

    @staticmethod
    def backward(ctx, *d_outputs):
        d_y_NO, d_sigma_NR = d_outputs
        saved, slots, setting, needed = ctx.saved_tensors, ctx.slots, ctx.setting, ctx.needs_input_grad
        count = len(slots)
        if torch.is_grad_enabled():  # somebody wants derivatives of it
            return _again(saved[: 5 + count], slots, setting._replace(sparse=False, sparse_keys=False), d_outputs)
        x_NI, _, left_PI, right_PO, column_P1 = saved[:5]
        scale, unit, length, way, weight_MNRk, held_NRk, attended_NR, sigma_NR, read_NRk, inner_NR, part_NRk = saved[
            5 + count :
        ]
        (left, right, value), (w, v, s) = _each(slots), _each([*weight_MNRk])

        d_part_NRk = _products(d_y_NO, right_PO, right.slot_NS).view_as(v)
        d_right = _outer(part_NRk.flatten(1), d_y_NO, right_PO, right, setting.sparse) if needed[3] else None
        d_both_NR = (d_part_NRk * v).sum(-1)
        d_inner_NR, d_sigma_NR = d_both_NR * sigma_NR, torch.addcmul(d_sigma_NR, d_both_NR, inner_NR)
        d_read_NS = (d_inner_NR[..., None] * w).flatten(1)
        d_x = _sums(left.slot_NS, left_PI, d_read_NS) if needed[0] else None
        d_left = _outer(d_read_NS, x_NI, left_PI, left, setting.sparse) if needed[2] else None
        ladder_RR = _ladder(attended_NR.shape[1], setting.order, attended_NR.dtype, attended_NR.device)
        d_attended_NR1 = (d_sigma_NR @ ladder_RR.t()).mul_(attended_NR.sigmoid())[..., None]
        d_column = _scattered(d_attended_NR1 * s, value.slot_NRk, column_P1, setting.sparse) if needed[4] else None
        d_query, d_tables = None, [None] * count
        if needed[1] or any(needed[7:]):
            d_w, d_v, d_s = d_inner_NR[..., None] * read_NRk, d_part_NRk, d_attended_NR1 * held_NRk
            d_v = d_v.mul_((inner_NR * sigma_NR)[..., None])
            d_weight = (d_w.add_(d_v).add_(d_s))[None] if count == 1 else torch.stack((d_w, d_v, d_s))
            along = (d_weight * weight_MNRk).sum(-1, keepdim=True)
            d_cosine = (d_weight.sub_(along)).mul_(weight_MNRk).mul_(setting.sharpness / way.shape[-2])[..., None, None]
            d_unit = (d_cosine * way).sum(3)
            d_query = d_unit.addcmul_(unit, (d_unit * unit).sum(-1, keepdim=True), value=-1).mul_(scale)
            if any(needed[7:]):
                d_way = d_cosine * unit[:, :, :, None]
                d_key = d_way.addcmul_(way, (d_way * way).sum(-1, keepdim=True), value=-1).mul_(length)
                d_tables = [
                    _scattered(d, own.place_NRkH, table, setting.sparse_keys)
                    for d, own, table in zip(d_key, slots, saved[5:], strict=False)
                ]
        return d_x, d_query, d_left, d_right, d_column, None, None, *d_tables


def _again(inputs: tuple[Tensor, ...], slots: list[Slots], setting: Setting, d_outputs: tuple) -> tuple:
    """Gradients that can be differentiated in turn: those of the plain function."""
    x_NI, query, *rest = inputs
    outputs = plain(x_NI, query, tuple(rest[:3]), rest[3:], slots, setting)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, d_outputs, create_graph=True, allow_unused=True))
    d_inputs = [next(found) if tensor.requires_grad else None for tensor in inputs]
    return *d_inputs[:5], None, None, *d_inputs[5:]


@cache
def _ladder(components: int, order: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The sums of Eq. 8 as a product: terms (N, R) @ ladder are the singular values."""
    ones = torch.ones(components, components, dtype=dtype, device=device)
    if order == "ascending":
        return ones.triu_()
    return ones.tril_() if order == "descending" else ones.triu_().flip(1)


def _products(x_NI: Tensor, bank_PI: Tensor, slot_NS: Tensor) -> Tensor:
    """The product of each row with its rows of the bank, (N, S). Where PyTorch can, as a product of which only some
    entries are computed; else by gathering as many rows at a time as the cache holds."""
    count, each = slot_NS.shape
    if x_NI.is_cpu and count and 0 < each <= len(bank_PI) and _samples():
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
def _samples() -> bool:
    """Whether this build computes some entries of a product by themselves. Asked once: the first tensor of this layout
    in a process warns that it is in beta."""
    if not torch.backends.mkl.is_available():
        return False
    with warnings.catch_warnings(action="ignore"):
        wanted = torch.sparse_csr_tensor(torch.arange(2), torch.zeros(1, dtype=torch.long), torch.zeros(1), (1, 1))
        try:
            torch.sparse.sampled_addmm(wanted, torch.ones(1, 1), torch.ones(1, 1), beta=0.0)
        except RuntimeError:
            return False
    return True


def _sums(rows: Tensor, table: Tensor, weights: Tensor, starts: Tensor | None = None) -> Tensor:
    """Sums of rows of the table by their weights; detached, since there is no derivative to take."""
    return F.embedding_bag(rows, table.detach(), starts, per_sample_weights=weights.detach(), mode="sum")


def _outer(weight_NS: Tensor, x_NI: Tensor, bank_PI: Tensor, slots: Slots, sparse: bool) -> Tensor:
    """The gradient of a bank: what each row was weighed by, times what it met, added up over those that read it."""
    rows, starts, readers, order = slots.readers
    values = _sums(readers, x_NI, weight_NS.flatten()[order], starts)
    if not sparse:
        return torch.zeros_like(bank_PI).index_copy_(0, rows, values)
    return torch.sparse_coo_tensor(rows[None], values, bank_PI.shape, check_invariants=False, is_coalesced=True)


def _scattered(d: Tensor, place: Tensor, table_TK: Tensor, sparse: bool) -> Tensor:
    """The gradient of a narrow table from that of the rows that were taken from it."""
    rows, values = place.flatten(), d.reshape(place.numel(), table_TK.shape[1])
    if not sparse:
        return torch.zeros_like(table_TK).index_add_(0, rows, values)
    return torch.sparse_coo_tensor(rows[None], values, table_TK.shape, check_invariants=False)
