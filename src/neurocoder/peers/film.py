"""FiLM: E. Perez et al., FiLM: Visual Reasoning with a General Conditioning Layer, AAAI 2018.

Shapes: Y rows, I in, O out.
"""

from __future__ import annotations

from torch import Tensor

from neurocoder.conditional import Modulation
from neurocoder.peers.modulated import Modulated


class FiLM(Modulated):
    """y = gamma(x) * (x W + b) + beta(x): a network of the input modulates what the wrapped linear layer makes of it.

    gamma starts at 1 and beta at 0.

    Args:
        layers: 1, a linear map, or 2, with a hidden layer of ReLUs.
        hidden: units of that hidden layer.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        layers: int = 1,
        hidden: int = 64,
        device=None,
        dtype=None,
    ):
        super().__init__(
            in_features,
            out_features,
            bias,
            layers=layers,
            hidden=hidden,
            scales=out_features,
            shifts=out_features,
            device=device,
            dtype=dtype,
        )

    def rows(self, x_YI: Tensor, lead: tuple[int, ...]) -> Tensor:
        scale_YO, shift_YO = self.generator(x_YI).tensor_split(2, -1)
        shape = (*lead, self.out_features)
        self._record(Modulation(scale_YO.reshape(shape), shift_YO.reshape(shape)))
        return scale_YO * self.linear(x_YI) + shift_YO
