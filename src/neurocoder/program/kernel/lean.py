"""Inference on a few rows, by as few operations as possible: what a step costs there is the number of its operations.

For layers without usage or a residual program whose queries are a linear map, by the paper's order of singular values.
Shapes: see `neurocoder.functional`.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from neurocoder import functional
from neurocoder.program.cached import watched
from neurocoder.program.controller import LinearController
from neurocoder.program.kernel import fused

if TYPE_CHECKING:
    from neurocoder.program.linear import Linear

_FEW = 64  # rows; with more, time goes into the operations themselves
_WHOLE = (torch.float32, torch.float64)  # half precision is computed in float32, which takes conversions


class Fixed(NamedTuple):
    """What does not depend on the input; the keys are sharpened for powers of two."""

    weight_XC: Tensor
    bias_X: Tensor
    left_PI: Tensor
    sharp_MPK: Tensor
    values_P: Tensor
    right_PO: Tensor
    bias_O: Tensor | None


def simple(layer: Linear) -> bool:
    """Whether the layer is of the kind that is done here."""
    plain = layer.memory.gate_weight is None and layer.residual is None and not layer.controlled
    return plain and isinstance(layer.controller, LinearController) and layer.rules.order == "descending"


def possible(layer: Linear, x: Tensor) -> bool:
    """Whether this call can be done here: few rows of the layer's type, and nobody looks, differentiates or maps."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or layer._calls is not None or watched():
        return False
    if not isinstance(x, Tensor) or x.dim() != 2 or torch._C._is_any_autocast_enabled():
        return False
    rows, width = x.shape
    return 0 < rows <= _FEW and width == layer.in_features and x.dtype == layer.gain.dtype and x.dtype in _WHOLE


def run(layer: Linear, x_NI: Tensor) -> Tensor:
    weight_XC, bias_X, left_PI, sharp_MPK, values_P, right_PO, bias_O = layer._once("all", lambda: _fix(layer))
    x_IN = x_NI.t()
    read_PN = torch.mm(left_PI, x_IN)
    signal_XN = torch.addmm(bias_X, weight_XC, x_IN if layer.controller_sees == "input" else read_PN)
    part_NP = fused.infer(signal_XN, sharp_MPK, read_PN, values_P, layer._setting).t()
    y_NO = torch.mm(part_NP, right_PO) if bias_O is None else torch.addmm(bias_O, part_NP, right_PO)
    return y_NO if layer.base is None else y_NO + layer.base(x_NI)


def _fix(layer: Linear) -> Fixed:
    memory, controller = layer.memory, layer.controller
    sharp_MPK = functional.sharpen(memory.keys(), layer.sharpness / log(2))
    bias_X = controller.bias[:, None]
    return Fixed(
        controller.weight, bias_X, memory.left, sharp_MPK, memory.values, memory.right * layer.gain, layer.bias
    )
