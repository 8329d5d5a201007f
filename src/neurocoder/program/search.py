"""Finding the slots that a component reads.

Shapes: see `neurocoder.functional`; k slots that a component reads, X = R * N queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.functional import best, best_products, half_scores, score
from neurocoder.program.addressing import Addressing
from neurocoder.program.kept import plainly

_SIDE = 64  # slots in a block, of which the search looks at the best first
_FEWEST = 8  # blocks: fewer are not worth a search
_ONE_BY_ONE = 4  # places that are found one after the other
_EMPTY = 29  # bits of a number of double precision that one of single precision leaves empty
_SCANNED = 1024  # slots that it scores at a time


@torch.no_grad()
def choose(query_MKRN: Tensor, sharp: Tensor, how: Addressing) -> Tensor:
    """The slots that each component reads, (M, k, R, N)."""
    if how.product_keys:
        return best_products(half_scores(query_MKRN, sharp), how.top_k, torch.topk if plainly() else largest)
    blocks = sharp.shape[1] // _SIDE
    if plainly() or blocks < max(how.top_k, _FEWEST):
        return best(score(query_MKRN, sharp), how.top_k)
    found = [_search(query.flatten(1), keys, how.top_k) for query, keys in zip(query_MKRN, sharp, strict=True)]
    return torch.stack(found).unflatten(2, query_MKRN.shape[2:])


def largest(score: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` of the last dimension: a few of many rows, all at once.

    A number of single precision leaves half of the bits of one of double precision empty. There its place goes, and a
    maximum tells both; PyTorch looks for a place number by number, and takes several times as long.
    """
    width = score.shape[-1]
    if score.dtype != torch.float32 or count > _ONE_BY_ONE or width >= 2**_EMPTY:
        return torch.topk(score, count)
    packed = score.double()
    packed.view(torch.int64).bitwise_or_(torch.arange(width, device=score.device))
    places = []
    for turn in range(count):
        best = packed.amax(-1, keepdim=True)
        places.append(best.view(torch.int64) & (2**_EMPTY - 1))
        if turn + 1 < count:
            packed.scatter_(-1, places[-1], -torch.inf)
    place = torch.cat(places, -1)
    return score.gather(-1, place), place


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
    block_Xk = largest(best_BX.t(), count)[1]
    keys_XCK = sharp_PK.view(-1, _SIDE * sharp_PK.shape[1])[block_Xk].view(len(query_XK), -1, sharp_PK.shape[1])
    place_Xk = largest(torch.einsum("xck,xk->xc", keys_XCK, query_XK), count)[1]
    return (block_Xk.gather(1, place_Xk // _SIDE) * _SIDE + place_Xk % _SIDE).t()
