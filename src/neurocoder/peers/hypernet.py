"""HyperNet, after D. Ha, A. Dai and Q. Le, HyperNetworks, ICLR 2017, as in Neurocoder's polynomial experiment.

Shapes: Y rows, I in, O out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder.conditional import Modulation, check_sizes
from neurocoder.peers.peer import Peer


def generator(in_features: int, out_features: int, layers: int, hidden: int, **factory: Any) -> nn.Sequential:
    """A network of one or two layers, ReLU between."""
    if layers not in (1, 2):
        raise ValueError(f"layers must be 1 or 2, got {layers}")
    check_sizes(hidden=hidden)
    inner = [nn.Linear(in_features, hidden, **factory), nn.ReLU()] if layers == 2 else []
    return nn.Sequential(*inner, nn.Linear(hidden if layers == 2 else in_features, out_features, **factory))


def reset(network: nn.Sequential, ones: int) -> None:
    """Start a generating network: whatever the input, its first outputs are 1 and the rest 0."""
    for layer in network:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    nn.init.zeros_(network[-1].weight)
    nn.init.zeros_(network[-1].bias)
    nn.init.ones_(network[-1].bias[:ones])


class HyperLinear(Peer):
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
        super().__init__(in_features, out_features)
        self.layers, self.hidden = layers, hidden
        self.linear = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.generator = generator(in_features, in_features, layers, hidden, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        reset(self.generator, ones=self.in_features)

    def options(self) -> dict[str, Any]:
        return {"layers": self.layers, "hidden": self.hidden}

    def rows(self, x_YI: Tensor, lead: tuple[int, ...]) -> Tensor:
        scale_YI = self.generator(x_YI)
        self._record(Modulation(scale_YI.reshape(*lead, self.in_features), None))
        return F.linear(x_YI * scale_YI, self.linear.weight, self.linear.bias)
