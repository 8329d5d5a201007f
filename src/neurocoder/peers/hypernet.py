"""HyperNet, after D. Ha, A. Dai and Q. Le, HyperNetworks, ICLR 2017, as in Neurocoder's polynomial experiment.

Shapes: Y rows, I in, O out, N rows of what the network looks at, C features of it.
"""

from __future__ import annotations

from torch import Tensor

from neurocoder.conditional import register
from neurocoder.peers.modulated import Modulated
from neurocoder.records import Modulation


@register("peers.HyperLinear")
class HyperLinear(Modulated):
    """y = (x * s(x)) W + b: a network of the input generates a scale for every row of the (in, out) weight.

    The paper says "adaptive scales for the output weight"; one scale an input feature is what gives its published size
    (28 scales of a 28-to-1 head: 3,529 parameters with the GRU, 3.5K in its Table 7). Scales start at 1.

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
            scales=in_features,
            shifts=0,
            device=device,
            dtype=dtype,
        )

    def rows(self, x_YI: Tensor, control_NC: Tensor, lead: tuple[int, ...]) -> Tensor:
        scale_NI = self.generator(control_NC)
        self.record(Modulation(scale_NI.reshape(*lead, self.in_features), None))
        return self.linear(x_YI * self.spread(scale_NI, x_YI))
