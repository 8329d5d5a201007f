"""FiLM: E. Perez et al., FiLM: Visual Reasoning with a General Conditioning Layer, AAAI 2018.

Shapes: Y rows, I in, O out, N rows of what the network looks at, C features of it.
"""

from __future__ import annotations

from torch import Tensor

from neurocoder.conditional import register
from neurocoder.peers.modulated import Modulated
from neurocoder.records import Modulation


@register("peers.FiLM")
class FiLM(Modulated):
    """y = gamma(x) * (x W + b) + beta(x): a network of the input modulates what the wrapped linear layer makes of it.

    gamma starts at 1 and beta at 0.

    Args:
        layers: 1, a linear map, or 2, with a hidden layer of ReLUs.
        hidden: units of that hidden layer.
        control_features: width of `control`, where the network looks at something other than x.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        layers: int = 1,
        hidden: int = 64,
        control_features: int | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__(
            in_features,
            out_features,
            bias,
            layers=layers,
            hidden=hidden,
            control_features=control_features,
            scales=out_features,
            shifts=out_features,
            device=device,
            dtype=dtype,
        )

    def rows(self, x_YI: Tensor, control_NC: Tensor, lead: tuple[int, ...]) -> Tensor:
        made_N2O = self.generator(control_NC)
        scale_NO, shift_NO = made_N2O.tensor_split(2, -1)
        shape = (*lead, self.out_features)
        self.record(Modulation(scale_NO.reshape(shape), shift_NO.reshape(shape)))
        scale_YO, shift_YO = self.spread(made_N2O, x_YI).tensor_split(2, -1)
        return scale_YO * self.linear(x_YI) + shift_YO
