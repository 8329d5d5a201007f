"""The weights of the slots that were chosen: a softmax of their scores.

`plain` has the equations. By hand nothing is scored again: the search knows the scores already, and all that is left is
their derivative.

Shapes: see `neurocoder.functional`; k slots that a component reads; a key has H parts, two where it is a product, each
of length K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.functional import EPSILON, sharpen
from neurocoder.program.addressing import Addressing
from neurocoder.program.gather import Slots, differentiable, twice
from neurocoder.program.kept import plainly
from neurocoder.program.kernel.equations import unit_queries, unit_queries_backward
from neurocoder.program.search import Chosen


class Weighing(NamedTuple):
    """What is no tensor."""

    sharpness: float
    how: Addressing
    slots: int

    @property
    def parts(self) -> int:
        return 2 if self.how.product_keys else 1

    @property
    def sparse(self) -> bool:
        """Whether gradients of keys are."""
        return self.how.sparse and not self.how.product_keys


def weigh(
    query_MKRN: Tensor, keys: list[Tensor], sharp: Tensor, chosen: Chosen, slots: list[Slots], setting: Weighing
) -> Tensor:
    """The weights of the chosen slots, (M, k, R, N).

    Args:
        keys: of each bank, (P, K), or of products (2, Q, K).
        sharp: all of them as `functional.score` takes them, without a graph.
        slots: the chosen, by bank.
    """
    if plainly() or any(key.dtype != query_MKRN.dtype for key in keys):
        return plain(query_MKRN, keys, chosen.slot_MkRN, setting, setting.sparse and not plainly())
    return _Weigh.apply(query_MKRN, sharp, chosen, slots, setting, *keys)  # pyright: ignore


def plain(query_MKRN: Tensor, keys: list[Tensor], slot_MkRN: Tensor, setting: Weighing, sparse: bool) -> Tensor:
    """The equations."""
    scores = []
    for query_KRN, key, slot_kRN in zip(query_MKRN, keys, slot_MkRN, strict=True):
        parts = key.unbind() if setting.how.product_keys else (key,)
        units = sharpen(query_KRN.unflatten(0, (len(parts), -1)).permute(0, 2, 3, 1), 1.0)
        places, sharpness = setting.how.places(slot_kRN, setting.slots), setting.sharpness / len(parts)
        score_kRN = 0.0
        for part, unit_RNK, place_kRN in zip(parts, units, places, strict=True):
            read_kRNK = F.embedding(place_kRN, part, sparse=sparse).to(query_KRN.dtype)
            score_kRN = score_kRN + (sharpen(read_kRNK, sharpness) * unit_RNK).sum(-1)
        scores.append(score_kRN)
    return torch.stack(scores).softmax(1)


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_MKRN, sharp, chosen, slots, setting, *keys):
        weight_MkRN = chosen.score_MkRN.softmax(1)
        ctx.slots, ctx.setting = slots, setting
        ctx.save_for_backward(query_MKRN, sharp, chosen.slot_MkRN, weight_MkRN, *keys)
        return weight_MkRN

    @staticmethod
    def backward(ctx, *d_outputs):
        query_MKRN, sharp, slot_MkRN, weight_MkRN, *keys = ctx.saved_tensors
        slots, setting, needed = ctx.slots, ctx.setting, ctx.needs_input_grad
        if twice(d_outputs[0]):

            def run(query_MKRN, *keys):
                return plain(query_MKRN, keys, slot_MkRN, setting, sparse=False)

            d_query, *d_keys = differentiable(run, (query_MKRN, *keys), d_outputs)
            return d_query, None, None, None, None, *d_keys
        d_score = d_outputs[0] * weight_MkRN
        d_score.addcmul_(weight_MkRN, d_score.sum(1, keepdim=True), value=-1)
        banks, parts, size = len(keys), setting.parts, sharp.shape[-1]
        unit, scale = unit_queries(query_MKRN.reshape(banks * parts, size, *query_MKRN.shape[2:]))
        place = torch.stack(setting.how.places(slot_MkRN, setting.slots), 1).flatten(0, 1)
        place = place.flatten(1)[:, None].expand(-1, size, -1)  # (M * H, K, k * R * N): of each number of a key
        d_each = d_score[:, None].expand(-1, parts, -1, -1, -1).flatten(0, 1)[:, None]  # (M * H, 1, k, R, N)
        d_query, d_keys = None, [None] * banks
        if needed[0]:
            read = sharp.reshape(banks * parts, -1, size).transpose(1, 2).gather(2, place)
            d_unit = (read.unflatten(2, d_each.shape[2:]) * d_each).sum(2)
            d_query = unit_queries_backward(d_unit, unit, scale).view_as(query_MKRN)
        if any(needed[5:]) and setting.sparse:
            d_keys = [_of_rows(*own, setting) for own in zip(keys, unit, d_score, slots, strict=True)]
        elif any(needed[5:]):
            d_sharp = sharp.new_zeros(banks * parts, size, sharp.shape[-2])
            d_sharp = d_sharp.scatter_add_(2, place, (unit[:, :, None] * d_each).flatten(2)).transpose(1, 2)
            d_keys = _unsharpen(d_sharp.reshape(sharp.shape), torch.stack(keys), setting).unbind()
        return d_query, None, None, None, None, *d_keys


def _of_rows(key_PK: Tensor, unit_KRN: Tensor, d_score_kRN: Tensor, slots: Slots, setting: Weighing) -> Tensor:
    """The gradient of keys, of those that were read."""
    rows, bounds, readers, order = slots.readers
    unit_NRK, weights = unit_KRN.permute(2, 1, 0), d_score_kRN.permute(2, 0, 1).flatten()[order]
    which, units = readers * unit_NRK.shape[1] + order % unit_NRK.shape[1], unit_NRK.reshape(-1, key_PK.shape[1])
    d_sharp = F.embedding_bag(which, units, bounds, per_sample_weights=weights, mode="sum", include_last_offset=True)
    return slots.gradient(_unsharpen(d_sharp, key_PK[rows], setting), key_PK)


def _unsharpen(d_sharp: Tensor, key: Tensor, setting: Weighing) -> Tensor:
    """The derivative of `functional.sharpen`."""
    length = key.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
    way = key * length
    along = (d_sharp * way).sum(-1, keepdim=True)
    return torch.addcmul(d_sharp, way, along, value=-1).mul_(length).mul_(setting.sharpness / setting.parts)
