"""HyperNet, after D. Ha, A. Dai and Q. Le, HyperNetworks, ICLR 2017, as in Neurocoder's polynomial experiment.

Shapes: Y rows, I in, O out.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from neurocoder.conditional import Modulation
from neurocoder.peers.modulated import Modulated


class HyperLinear(Modulated):
    """y = (x * s(x)) W + b: a network of the input generates a scale for every row of the (in, out) weight.

    The paper says "adaptive scales for the output weight"; one scale an input feature is what gives its published size
    (28 scales of a 28-to-1 head: 3,529 parameters with the GRU, 3.5K in its Table 7). Scales start at 1.

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
            scales=in_features,
            shifts=0,
            device=device,
            dtype=dtype,
        )

    def rows(self, x_YI: Tensor, lead: tuple[int, ...]) -> Tensor:
        scale_YI = self.generator(x_YI)
        self._record(Modulation(scale_YI.reshape(*lead, self.in_features), None))
        return F.linear(x_YI * scale_YI, self.linear.weight, self.linear.bias)
