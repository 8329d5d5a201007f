"""A composed program in factored form."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from neurocoder.functional import coordinates


class Composition(NamedTuple):
    """Attention and singular values of one program a row of the control, and the multiplier of the residual program.

    Shapes: see `neurocoder.functional`.
    """

    left_PRN: Tensor
    right_PRN: Tensor
    values_PRN: Tensor
    sigma_RN: Tensor
    residual_N: Tensor | None
    slots_MkRN: Tensor | None = None  # that each component reads, where it does not read all

    def core(self) -> Tensor:
        """The program in the coordinates of the memories: (N, P, P)."""
        return coordinates(self.left_PRN, self.sigma_RN, self.right_PRN)
