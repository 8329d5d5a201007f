"""Everything that is linear in the control: the maps of the controller and of the gates that look at it."""

from __future__ import annotations

import torch
from torch import Tensor

_MANY = 16  # with so many rows a column, products of a transposed copy are twice as fast


def columns(rows_NC: Tensor) -> Tensor:
    """Rows as columns, (C, N), in the layout in which products with them are fastest."""
    rows, width = rows_NC.shape
    columns_CN = rows_NC.t()
    if torch.compiler.is_compiling() or rows <= _MANY * width:
        return columns_CN
    return columns_CN.contiguous()


def product(weight_XC: Tensor, bias_X: Tensor | None, control_CN: Tensor) -> Tensor:
    """What a linear map makes of every column: (X, N)."""
    return weight_XC @ control_CN if bias_X is None else torch.addmm(bias_X[:, None], weight_XC, control_CN)
