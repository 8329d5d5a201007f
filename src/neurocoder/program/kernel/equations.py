"""The equations of `neurocoder.functional` by hand, each followed by its derivative: few passes over memory, in place.

Attention to the memories is (J, P, M, H, N), in the letters of `neurocoder.functional`: one block a step, slots first.
Without usage the steps do not matter: then all components count as one, (1, P, M, R, N), a view of (M, P, R, N).

Facts of PyTorch on a CPU that shape the code here and in `usage`: a comparison is several times faster into a float
than into a bool (`out=`), a reduction runs over whole vectors if its dimension comes before the contiguous ones, and an
operation on a few thousand numbers costs more to call than to carry out.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.functional import EPSILON

_SAFE = 40.0  # exp(±40) and sums of it are far from the limits of float32: no maximum need be subtracted


def unit_queries(query_MKRN: Tensor) -> tuple[Tensor, Tensor]:
    """Queries of unit length for the cosines of Eq. 11, and what they were multiplied by."""
    scale = query_MKRN.square().sum(1, keepdim=True).add_(EPSILON).rsqrt_()
    return query_MKRN * scale, scale


def unit_queries_backward(d_unit: Tensor, unit_MKRN: Tensor, scale: Tensor) -> Tensor:
    along = (unit_MKRN * d_unit).sum(1, keepdim=True)
    return d_unit.addcmul_(unit_MKRN, along, value=-1).mul_(scale)


def score(unit_MKRN: Tensor, sharp_MPK: Tensor, sharpness: float) -> Tensor:
    """The sharpened cosines inside of Eq. 11, (M, P, R * N), small enough for their exponentials."""
    score_MPX = torch.bmm(sharp_MPK, unit_MKRN.flatten(2))
    return score_MPX if sharpness <= _SAFE else score_MPX.sub_(score_MPX.amax(1, keepdim=True))


def score_backward(d_score_MPX: Tensor, unit_MKRN: Tensor, sharp_MPK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the unit queries and the sharp keys."""
    d_unit = torch.bmm(sharp_MPK.transpose(1, 2), d_score_MPX).view(unit_MKRN.shape)
    return d_unit, torch.bmm(d_score_MPX, unit_MKRN.flatten(2).transpose(1, 2))


def by_step(score_MPX: Tensor, steps: int, heads: int, rows: int) -> Tensor:
    """Scores as (J, P, M, H, N)."""
    return score_MPX.view(3, score_MPX.shape[1], steps, heads, rows).permute(2, 1, 0, 3, 4)


def exponential(score_JPMHN: Tensor) -> Tensor:
    """The exponential of Eq. 11, of scores in `BITS`: several steps come to lie in one piece each, one stays where it
    is."""
    if len(score_JPMHN) == 1:
        return score_JPMHN.exp2_()
    return torch.exp2(score_JPMHN, out=score_JPMHN.new_empty(score_JPMHN.shape))


def normalise(content: Tensor) -> Tensor:
    """The sum of Eq. 11, over slots, which come second."""
    return content.div_(content.sum(1, keepdim=True))


def content_backward(d_content: Tensor, content_JPMHN: Tensor) -> Tensor:
    """The gradient of the scores, (M, P, R * N), from that of content attention, which is overwritten."""
    total = d_content.mul_(content_JPMHN).sum(1, keepdim=True)
    if len(content_JPMHN) == 1:
        return d_content.addcmul_(content_JPMHN, total, value=-1).permute(2, 1, 0, 3, 4).flatten(2)
    steps, slots, banks, heads, rows = content_JPMHN.shape
    d_score_MPJHN = content_JPMHN.new_empty(banks, slots, steps, heads, rows)
    torch.addcmul(d_content, content_JPMHN, total, value=-1, out=d_score_MPJHN.permute(2, 1, 0, 3, 4))
    return d_score_MPJHN.flatten(2)


def singular_values(values_P: Tensor, weights_JPHN: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 8: singular values (R, N), and the terms inside of their softplus (J, H, N)."""
    steps, _, heads, rows = weights_JPHN.shape
    terms_JHN = torch.matmul(values_P, weights_JPHN.flatten(2)).view(steps, heads, rows)
    return ladder(terms_JHN.flatten(0, 1)) @ F.softplus(terms_JHN).flatten(0, 1), terms_JHN


def ladder(terms_RN: Tensor, order: str = "descending") -> Tensor:
    """The sums of Eq. 8 as a product: ladder @ terms are the singular values."""
    make = _ladder if type(terms_RN) is Tensor else _ladder.__wrapped__  # what stands for a tensor is not for all
    return make(len(terms_RN), order, terms_RN.dtype, terms_RN.device)


@cache
def _ladder(components: int, order: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    ones = torch.ones(components, components, dtype=dtype, device=device)
    if order == "ascending":
        return ones.tril_()
    return ones.triu_() if order == "descending" else ones.tril_().flip(0)


def singular_values_backward(
    d_sigma_JHN: Tensor, values_P: Tensor, weights_JPHN: Tensor, terms_JHN: Tensor, d_weights: Tensor
) -> Tensor:
    """Writes the gradient of the attention, and returns that of the values."""
    d_sigma_RN = d_sigma_JHN.flatten(0, 1)
    d_terms = (ladder(d_sigma_RN).t() @ d_sigma_RN).view_as(terms_JHN).mul_(terms_JHN.sigmoid())[:, None]
    d_values = _over_steps(torch.mul(weights_JPHN, d_terms, out=d_weights)).sum((1, 2))
    torch.mul(values_P[:, None, None], d_terms, out=d_weights)
    return d_values


def transform(read_PN: Tensor, left_JPHN: Tensor, sigma_RN: Tensor, right_JPHN: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 3 to 7: the read through the composed program (P, N), and what the left vectors see of it (J, H, N)."""
    work = left_JPHN * read_PN[:, None]
    inner_JHN = work.sum(1)
    outer_JHN = inner_JHN * sigma_RN.view_as(inner_JHN)
    return _over_steps(torch.mul(right_JPHN, outer_JHN[:, None], out=work)).sum(1), inner_JHN


def transform_backward(
    d_part_PN: Tensor, d_sigma_RN: Tensor, read_PN: Tensor, left_JPHN: Tensor, sigma_RN: Tensor, right_JPHN: Tensor,
    inner_JHN: Tensor, d_left: Tensor, d_right: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes the gradients of left and right attention; returns that of the read, and d_sigma with what comes here."""
    sigma_JHN = sigma_RN.view_as(inner_JHN)
    d_outer_JHN = torch.mul(right_JPHN, d_part_PN[:, None], out=d_right).sum(1)
    torch.mul(d_part_PN[:, None], (inner_JHN * sigma_JHN)[:, None], out=d_right)
    d_inner = (d_outer_JHN * sigma_JHN)[:, None]
    d_read = _over_steps(torch.mul(left_JPHN, d_inner, out=d_left)).sum(1)
    torch.mul(read_PN[:, None], d_inner, out=d_left)
    return d_read, torch.addcmul(d_sigma_RN.view_as(inner_JHN), d_outer_JHN, inner_JHN)


def _over_steps(x_JPHN: Tensor) -> Tensor:
    return x_JPHN[0] if len(x_JPHN) == 1 else x_JPHN.sum(0)
