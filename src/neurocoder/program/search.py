"""Finding the slots that a component reads.

Shapes: see `neurocoder.functional`; k slots that a component reads, X = R * N queries.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.functional import best, best_products, half_scores, score
from neurocoder.program.addressing import Addressing
from neurocoder.program.kept import plainly
from neurocoder.program.kernel.equations import unit_queries

_SIDE = 64  # slots in a block, of which the search looks at the best first
_FEW = 48  # numbers that are not worth a search in blocks
_ONE_BY_ONE = 4  # places that are found one after the other
_EMPTY = 29  # bits of a number of double precision that one of single precision leaves empty
_SCANNED = 1024  # slots that it scores at a time
_HELD = 2**20  # scores of halves of keys that are held at once
_SOUGHT = 4096  # queries for which it looks at once, at most,
_LOOKED = 2**22  # and numbers of keys that it looks at for them


class Chosen(NamedTuple):
    """The slots that each component reads, and their scores."""

    score_MkRN: Tensor
    slot_MkRN: Tensor


@torch.no_grad()
def choose(query_MKRN: Tensor, sharp: Tensor, how: Addressing) -> Chosen:
    """The slots of the largest scores."""
    if how.product_keys and plainly():
        return Chosen(*best_products(half_scores(query_MKRN, sharp), how.top_k))
    if how.product_keys:
        scores = sharp[..., 0].numel() * query_MKRN.shape[2]  # of an input
        blocks = query_MKRN.split(max(1, _HELD // max(1, scores)), 3)
        found = [best_products(half_scores(block, sharp), how.top_k, largest) for block in blocks]
        return Chosen(*(torch.cat(part, 3) for part in zip(*found, strict=True)))
    if plainly():
        return Chosen(*best(score(query_MKRN, sharp), how.top_k))
    if sharp.shape[1] <= max(_SCANNED, _SIDE * (how.top_k or 0)):
        return Chosen(*largest(score(query_MKRN, sharp), how.top_k, 1))
    unit_MKRN = unit_queries(query_MKRN)[0]
    found = [_search_in_parts(query.flatten(1), keys, how.top_k) for query, keys in zip(unit_MKRN, sharp, strict=True)]
    return Chosen(*(torch.stack(part).unflatten(2, query_MKRN.shape[2:]) for part in zip(*found, strict=True)))


def largest(score: Tensor, count: int, dim: int) -> tuple[Tensor, Tensor]:
    """`torch.topk`, of a few of many rows, all at once. Fastest where `dim` is not the last.

    They lie in the blocks of the largest maxima, and only of those is each number looked at.
    """
    width = score.shape[dim]
    if score.dtype != torch.float32 or count > _ONE_BY_ONE:
        return torch.topk(score, count, dim)
    side = 1 << max(1, isqrt(width // count).bit_length() - 1)
    if width < _FEW:
        return _packed(score, count, dim)
    whole = width // side * side
    maxima = score.narrow(dim, 0, whole).unflatten(dim, (-1, side)).amax(dim + 1)
    if whole < width:
        maxima = torch.cat((maxima, score.narrow(dim, whole, width - whole).amax(dim, keepdim=True)), dim)
    peak, block = _packed(maxima, count, dim)
    inside = _count_along(dim, side, score)
    at = (block.unsqueeze(dim + 1) * side + inside).flatten(dim, dim + 1)
    held = score.gather(dim, at.clamp(max=width - 1))
    if whole < width:
        held.masked_fill_(at >= width, torch.finfo(score.dtype).min)
    held, place = _packed(held, count, dim)
    return held.masked_fill_(peak.isnan(), torch.nan), at.gather(dim, place).clamp_(max=width - 1)


def _packed(score: Tensor, count: int, dim: int) -> tuple[Tensor, Tensor]:
    """The same of short rows. A number of single precision leaves half of the bits of one of double precision empty.
    There its place goes, and a maximum tells both; PyTorch looks for a place number by number, and takes longer."""
    packed, width = score.double(), score.shape[dim]
    packed.view(torch.int64).bitwise_or_(_count_along(dim, width, score))
    tops, places = [], []
    for turn in range(count):
        tops.append(packed.amax(dim, keepdim=True))
        place = tops[-1].view(torch.int64) & (2**_EMPTY - 1)
        places.append(place.clamp_(max=width - 1))  # NaN has no place, and no number beside it shall hide it
        if turn + 1 < count:
            packed.scatter_(dim, places[-1], -torch.inf)
    found = torch.cat(places, dim)
    return score.gather(dim, found).masked_fill_(torch.cat(tops, dim).isnan(), torch.nan), found


def _count_along(dim: int, count: int, like: Tensor) -> Tensor:
    """0, 1, ... along a dimension of it."""
    return torch.arange(count, device=like.device).view(-1, *[1] * (like.dim() - 1 - dim))


def _search_in_parts(query_KX: Tensor, sharp_PK: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest products, (count, X), and their slots, as `largest` finds them, but the scores of all slots are never
    held at once, nor those of many blocks."""
    query_XK, (slots, size) = query_KX.t().contiguous(), sharp_PK.shape
    rest = -slots % _SIDE
    if rest:  # what fills the last block is never chosen
        sharp_PK = F.pad(F.pad(sharp_PK, (0, 1)), (0, 0, 0, rest))
        sharp_PK[slots:, size] = torch.finfo(sharp_PK.dtype).min / 2
        query_XK = F.pad(query_XK, (0, 1), value=1.0)
    some = min(_SOUGHT, max(1, _LOOKED // (count * _SIDE * size)))
    found = [_search(part_XK, sharp_PK, count) for part_XK in query_XK.split(some)]
    scores, places = (torch.cat(part, 1) for part in zip(*found, strict=True))
    return scores, places.clamp_(max=slots - 1)


def _search(query_XK: Tensor, sharp_PK: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best_BX = sharp_PK.new_empty(len(sharp_PK) // _SIDE, len(query_XK))
    for at in range(0, len(sharp_PK), _SCANNED):
        score_PX = sharp_PK[at : at + _SCANNED] @ query_XK.t()
        torch.amax(score_PX.unflatten(0, (-1, _SIDE)), 1, out=best_BX[at // _SIDE : (at + _SCANNED) // _SIDE])
    peak_kX, block_kX = largest(best_BX, count, 0)
    block_Xk = block_kX.t()
    keys_XCK = sharp_PK.view(-1, _SIDE, sharp_PK.shape[1])[block_Xk].flatten(1, 2)
    score_Xk, place_Xk = largest(torch.einsum("xck,xk->xc", keys_XCK, query_XK), count, 1)
    score_kX = score_Xk.t().masked_fill(peak_kX.isnan(), torch.nan)
    return score_kX, (block_Xk.gather(1, place_Xk // _SIDE) * _SIDE + place_Xk % _SIDE).t()
