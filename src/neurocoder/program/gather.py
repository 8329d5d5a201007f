"""Reading a few rows of a bank for each input, by gathering them: what it costs does not depend on how many there are.

Shapes: see `neurocoder.functional`; k slots that a component reads, S = R * k of them for each of Y rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.functional import EPSILON, best, best_products, half_scores, score, sharpen
from neurocoder.program.addressing import Addressing
from neurocoder.program.kept import watched
from neurocoder.program.memory import ProgramMemory

_BLOCK = 2**17  # numbers gathered at a time: what the cache of a CPU holds
_SIDE = 64  # slots in a block, of which the search looks at the best first
_FEWEST = 8  # blocks: fewer are not worth a search
_SCANNED = 1024  # slots that it scores at a time


Read = tuple[Tensor, Tensor]  # slots, and attention to them


class Places:
    """The slots that each row reads, (Y, S), and who reads each of them: found out once, however many ask."""

    def __init__(self, slots_YS: Tensor):
        self.slots_YS = slots_YS

    @cached_property
    def readers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The slots that anybody reads, in order; where the readers of each start in the list of all; that list; and
        which place of `slots_YS` each of it was."""
        at, order = self.slots_YS.flatten().sort()
        rows, counts = torch.unique_consecutive(at, return_counts=True)
        return rows, counts.cumsum(0) - counts, order // max(1, self.slots_YS.shape[1]), order


def read(x_YI: Tensor, bank_PI: Tensor, places: Places, sparse: bool) -> Tensor:
    """The product of each row of x with its rows of the bank: (Y, S)."""
    if _plainly() or x_YI.dtype != bank_PI.dtype:
        return (_rows(bank_PI, places.slots_YS, sparse) * x_YI[:, None]).sum(-1)
    return _Read.apply(x_YI, bank_PI, places, sparse)  # pyright: ignore[reportReturnType]


def write(weight_YS: Tensor, bank_PO: Tensor, places: Places, sparse: bool) -> Tensor:
    """The sum of the rows of the bank, by their weights: (Y, O)."""
    if _plainly() or weight_YS.dtype != bank_PO.dtype:
        return (_rows(bank_PO, places.slots_YS, sparse) * weight_YS[..., None]).sum(1)
    return _Write.apply(weight_YS, bank_PO, places, sparse)  # pyright: ignore[reportReturnType]


def spread(reads: list[Read], to_rows: Callable[[Tensor], Tensor]) -> list[tuple[Places, Tensor]]:
    """Of slots and weights (k, R, N), those that each row of x reads, (Y, R * k); the same is spread once."""
    done: list[tuple[Places, Tensor]] = []
    for at, (slots_kRN, weight_kRN) in enumerate(reads):
        if at and slots_kRN is reads[0][0]:
            done.append(done[0])
            continue
        slots_YS, weight_YS = (to_rows(part.permute(2, 1, 0).flatten(1)) for part in (slots_kRN, weight_kRN))
        done.append((Places(slots_YS), weight_YS))
    return done


@torch.no_grad()
def choose(query_MKRN: Tensor, sharp: Tensor, how: Addressing) -> Tensor:
    """The slots that each component reads, (M, k, R, N)."""
    if how.product_keys:
        return best_products(half_scores(query_MKRN, sharp), how.top_k)
    blocks = sharp.shape[1] // _SIDE
    if _plainly() or blocks < max(how.top_k, _FEWEST):
        return best(score(query_MKRN, sharp), how.top_k)
    found = [_search(query.flatten(1), keys, how.top_k) for query, keys in zip(query_MKRN, sharp, strict=True)]
    return torch.stack(found).unflatten(2, query_MKRN.shape[2:])


def _search(query_KX: Tensor, sharp_PK: Tensor, count: int) -> Tensor:
    """The slots of the largest products, (count, X): they lie in the blocks of the largest maxima, and only of those is
    each slot looked at. The scores of all slots are never held at once."""
    query_XK, (slots, size) = query_KX.t().contiguous(), sharp_PK.shape
    rest = -slots % _SIDE
    if rest:  # what fills the last block is never chosen
        sharp_PK = F.pad(F.pad(sharp_PK, (0, 1)), (0, 0, 0, rest))
        sharp_PK[slots:, size] = torch.finfo(sharp_PK.dtype).min / 2
        query_XK = F.pad(query_XK, (0, 1), value=1.0)
    best_BX = sharp_PK.new_empty(len(sharp_PK) // _SIDE, len(query_XK))
    for at in range(0, len(sharp_PK), _SCANNED):
        score_PX = sharp_PK[at : at + _SCANNED] @ query_XK.t()
        torch.amax(score_PX.unflatten(0, (-1, _SIDE)), 1, out=best_BX[at // _SIDE : (at + _SCANNED) // _SIDE])
    block_Xk = best_BX.t().contiguous().topk(count, sorted=False).indices
    keys_XCK = sharp_PK.view(-1, _SIDE * sharp_PK.shape[1])[block_Xk].view(len(query_XK), -1, sharp_PK.shape[1])
    place_Xk = torch.einsum("xck,xk->xc", keys_XCK, query_XK).topk(count, sorted=False).indices
    return (block_Xk.gather(1, place_Xk // _SIDE) * _SIDE + place_Xk % _SIDE).t()


def attend(
    query_MKRN: Tensor, memory: ProgramMemory, how: Addressing, sharpness: float, sharp_keys: Callable
) -> list[Read]:
    """Of the left, the right and the value memory, the slots that are read and the attention to them, each (k, R, N):
    a softmax over those alone."""
    with torch.no_grad():  # the keys of slots that are not read need no gradient
        sharp = sharp_keys(query_MKRN.dtype)
    slots_MkRN = choose(query_MKRN, sharp, how)
    reads = []
    for query_KRN, slots_kRN, bank in zip(query_MKRN, slots_MkRN, how.banks, strict=True):
        key = memory.bank_keys(bank)
        if how.product_keys:
            places = slots_kRN.div(key.shape[1], rounding_mode="floor"), slots_kRN % key.shape[1]
            halves = zip(query_KRN.chunk(2), key, places, strict=True)
            first, second = (cosine(query, half[at], sharpness / 2) for query, half, at in halves)
            score_kRN = first + second
        else:
            score_kRN = cosine(query_KRN, _rows(key, slots_kRN, how.sparse), sharpness)
        reads.append((slots_kRN, score_kRN.softmax(0)))
    return reads * 3 if how.one_choice else reads


def values(column_P1: Tensor, slots_kRN: Tensor, weight_kRN: Tensor, sparse: bool) -> Tensor:
    """What is attended to of the value memory, (R, N)."""
    return (_rows(column_P1, slots_kRN, sparse)[..., 0].to(weight_kRN.dtype) * weight_kRN).sum(0)


def cosine(query_KRN: Tensor, key_kRNK: Tensor, sharpness: float) -> Tensor:
    """The sharpened cosines of queries with keys of their own, the inside of Eq. 11: (k, R, N)."""
    query_RNK = query_KRN.movedim(0, -1)
    unit_RNK = query_RNK * query_RNK.square().sum(-1, keepdim=True).add(EPSILON).rsqrt()
    return (sharpen(key_kRNK.to(unit_RNK.dtype), sharpness) * unit_RNK).sum(-1)


def _rows(bank_PI: Tensor, slots: Tensor, sparse: bool) -> Tensor:
    """These rows of the bank, (*slots, I)."""
    return F.embedding(slots, bank_PI, sparse=sparse and not _plainly())


def _plainly() -> bool:
    """Whether somebody maps, compiles or differentiates forward, and plain operations are to be had."""
    return torch.compiler.is_compiling() or watched()


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_YI, bank_PI, places, sparse):
        ctx.save_for_backward(x_YI, bank_PI)
        ctx.places, ctx.sparse = places, sparse
        return _products(x_YI, bank_PI, places.slots_YS)

    @staticmethod
    def backward(ctx, *d_outputs):
        (d_YS,) = d_outputs
        x_YI, bank_PI = ctx.saved_tensors
        d_x = write(d_YS, bank_PI, ctx.places, ctx.sparse) if ctx.needs_input_grad[0] else None
        d_bank = _outer(d_YS, x_YI, bank_PI, ctx.places, ctx.sparse) if ctx.needs_input_grad[1] else None
        return d_x, d_bank, None, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight_YS, bank_PO, places, sparse):
        ctx.save_for_backward(weight_YS, bank_PO)
        ctx.places, ctx.sparse = places, sparse
        return _sums(places.slots_YS, bank_PO, weight_YS)

    @staticmethod
    def backward(ctx, *d_outputs):
        (d_YO,) = d_outputs
        weight_YS, bank_PO = ctx.saved_tensors
        d_weight = read(d_YO, bank_PO, ctx.places, ctx.sparse) if ctx.needs_input_grad[0] else None
        d_bank = _outer(weight_YS, d_YO, bank_PO, ctx.places, ctx.sparse) if ctx.needs_input_grad[1] else None
        return d_weight, d_bank, None, None


def _products(x_YI: Tensor, bank_PI: Tensor, slots_YS: Tensor) -> Tensor:
    """Where PyTorch can, as a product of which only some entries are computed; else by gathering as many rows at a time
    as the cache holds."""
    count, each = slots_YS.shape
    if x_YI.is_cpu and count and 0 < each <= len(bank_PI) and _samples():
        starts = torch.arange(0, count * each + 1, each)
        wanted = torch.sparse_csr_tensor(
            starts, slots_YS.flatten(), x_YI.new_zeros(count * each), (count, len(bank_PI)), check_invariants=False
        )
        return torch.sparse.sampled_addmm(wanted, x_YI, bank_PI.t(), beta=0.0).values().view(count, each)
    some = max(1, _BLOCK // max(1, each * bank_PI.shape[1]))
    buffer = bank_PI.new_empty(min(some, count) * each, bank_PI.shape[1])
    product_YS = torch.empty(slots_YS.shape, dtype=bank_PI.dtype, device=bank_PI.device)
    for at in range(0, count, some):
        part = slots_YS[at : at + some]
        held = torch.index_select(bank_PI, 0, part.flatten(), out=buffer[: part.numel()]).unflatten(0, part.shape)
        torch.sum(held.mul_(x_YI[at : at + some, None]), -1, out=product_YS[at : at + some])
    return product_YS


@cache
def _samples() -> bool:
    """Whether this build computes some entries of a product by themselves. Asked once: the first tensor of this layout
    in a process warns that it is in beta."""
    if not torch.backends.mkl.is_available():
        return False
    with warnings.catch_warnings(action="ignore"):
        one = torch.ones(1, dtype=torch.long)
        wanted = torch.sparse_csr_tensor(torch.arange(2), one - 1, torch.zeros(1), (1, 1))
        try:
            torch.sparse.sampled_addmm(wanted, torch.ones(1, 1), torch.ones(1, 1), beta=0.0)
        except RuntimeError:
            return False
    return True


def _sums(rows: Tensor, table: Tensor, weights: Tensor, starts: Tensor | None = None) -> Tensor:
    """Sums of rows of the table by their weights; detached, since there is no derivative to take."""
    return F.embedding_bag(rows, table.detach(), starts, per_sample_weights=weights.detach(), mode="sum")


def _outer(weight_YS: Tensor, x_YI: Tensor, bank_PI: Tensor, places: Places, sparse: bool) -> Tensor:
    """The gradient of the bank: what each row was weighed by, times what it met, added up over those that read it."""
    if torch.is_grad_enabled():  # somebody wants derivatives of it
        values = (weight_YS[..., None] * x_YI[:, None]).flatten(0, 1)
        return torch.zeros_like(bank_PI).index_add(0, places.slots_YS.flatten(), values)
    rows, starts, readers, order = places.readers
    values = _sums(readers, x_YI, weight_YS.flatten()[order], starts)
    if not sparse:
        return torch.zeros_like(bank_PI).index_copy_(0, rows, values)
    return torch.sparse_coo_tensor(rows[None], values, bank_PI.shape, check_invariants=False, is_coalesced=True)
