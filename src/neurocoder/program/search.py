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
_SCANNED = 1024  # slots that it scores at a time


@torch.no_grad()
def choose(query_MKRN: Tensor, sharp: Tensor, how: Addressing) -> Tensor:
    """The slots that each component reads, (M, k, R, N)."""
    if how.product_keys:
        return best_products(half_scores(query_MKRN, sharp), how.top_k)
    blocks = sharp.shape[1] // _SIDE
    if plainly() or blocks < max(how.top_k, _FEWEST):
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
