"""Inference on a few rows, by as few operations as possible: what a step costs there is the number of its operations.

For layers without usage or a residual program whose queries are a linear map, by the paper's order of singular values.
Shapes: see `neurocoder.functional`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from neurocoder.precision import autocasting
from neurocoder.program.kept import watched
from neurocoder.program.kernel import equations

_FEW = 64  # rows; with more, time goes into the operations themselves
_WHOLE = (torch.float32, torch.float64)  # half precision is computed in float32, which takes conversions


class Fixed(NamedTuple):
    """What does not depend on the input. Keys are sharpened for base two, whose powers cost half as much."""

    weight_XC: Tensor
    bias_X1: Tensor
    left_PI: Tensor
    sharp_MPK: Tensor
    values_P: Tensor
    right_PO: Tensor
    bias_O: Tensor | None
    sharpness: float
    reads: bool  # whether the controller looks at what the left programs read


def possible(x: Tensor, width: int, dtype: torch.dtype) -> bool:
    """Whether rows can be done here: few, of the layer's width and type, and nobody differentiates or maps."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or watched():
        return False
    if not isinstance(x, Tensor) or x.dim() != 2 or autocasting(x):
        return False
    rows, columns = x.shape
    return 0 < rows <= _FEW and columns == width and x.dtype == dtype and dtype in _WHOLE


def run(x_NI: Tensor, fixed: Fixed) -> Tensor:
    weight_XC, bias_X1, left_PI, sharp_MPK, values_P, right_PO, bias_O, sharpness, reads = fixed
    x_IN = x_NI.t()
    read_PN = torch.mm(left_PI, x_IN)
    signal_XN = torch.addmm(bias_X1, weight_XC, read_PN if reads else x_IN)
    banks, slots, key_dim = sharp_MPK.shape
    components, rows = signal_XN.shape[0] // (banks * key_dim), x_NI.shape[0]
    unit_MKX, _ = equations.unit_queries(signal_XN.view(banks, key_dim, components * rows))
    content_MPX = equations.normalise(equations.score(unit_MKX, sharp_MPK, sharpness).exp2_())
    left, right, weights = content_MPX.view(banks, slots, components, rows).unbind(0)
    inner_RN = left.mul_(read_PN[:, None]).sum(0)
    terms_RN = F.softplus(torch.matmul(values_P, weights.flatten(1)).view_as(inner_RN))
    sigma_RN = torch.mm(equations.ladder(terms_RN), terms_RN)
    part_NP = right.mul_(inner_RN.mul_(sigma_RN)).sum(1).t()
    return torch.mm(part_NP, right_PO) if bias_O is None else torch.addmm(bias_O, part_NP, right_PO)
