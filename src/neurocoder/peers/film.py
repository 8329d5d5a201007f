"""FiLM: E. Perez et al., FiLM: Visual Reasoning with a General Conditioning Layer, AAAI 2018.

Shapes: Y rows, I in, O out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from neurocoder.conditional import Modulation
from neurocoder.peers.hypernet import generator, reset
from neurocoder.peers.peer import Peer


class FiLM(Peer):
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
        super().__init__(in_features, out_features)
        self.layers, self.hidden = layers, hidden
        self.linear = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.generator = generator(in_features, 2 * out_features, layers, hidden, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        reset(self.generator, ones=self.out_features)

    def options(self) -> dict[str, Any]:
        return {"layers": self.layers, "hidden": self.hidden}

    def rows(self, x_YI: Tensor, lead: tuple[int, ...]) -> Tensor:
        scale_YO, shift_YO = self.generator(x_YI).tensor_split(2, -1)
        shape = (*lead, self.out_features)
        self._record(Modulation(scale_YO.reshape(shape), shift_YO.reshape(shape)))
        return scale_YO * self.linear(x_YI) + shift_YO
