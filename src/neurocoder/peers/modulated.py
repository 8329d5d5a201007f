"""What HyperNet and FiLM share: a linear layer, and a network of the input that modulates it."""

from __future__ import annotations

from typing import Any

from torch import nn

from neurocoder.conditional import check_sizes
from neurocoder.peers.peer import Peer


class Modulated(Peer):
    """A linear layer beside a network that generates scales, which start at 1, and shifts, which start at 0.

    Args:
        layers: of that network: 1, a linear map, or 2, with a hidden layer of ReLUs.
        hidden: units of the hidden layer.
        control_features: width of `control`, where the network looks at something other than x.
        scales, shifts: how many the network generates.
    """

    size = "hidden"
    _adopted = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        layers: int,
        hidden: int,
        control_features: int | None,
        scales: int,
        shifts: int,
        **factory: Any,
    ):
        super().__init__(in_features, out_features, control_features)
        if layers not in (1, 2):
            raise ValueError(f"layers must be 1 or 2, got {layers}")
        check_sizes(hidden=hidden)
        self.layers, self.hidden, self._scales = layers, hidden, scales
        self.linear = nn.Linear(in_features, out_features, bias, **factory)
        inner = [nn.Linear(self.control_features, hidden, **factory), nn.ReLU()] if layers == 2 else []
        last = nn.Linear(hidden if layers == 2 else self.control_features, scales + shifts, **factory)
        self.generator = nn.Sequential(*inner, last)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise anew; a trained layer that is kept stays as it is."""
        for layer in (*([] if self._adopted else [self.linear]), *self.generator):
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        last = self.generator[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        nn.init.ones_(last.bias[: self._scales])

    def options(self) -> dict[str, Any]:
        return {"layers": self.layers, "hidden": self.hidden, **self.control_option()}

    def adopt(self, base: nn.Linear | nn.Conv2d) -> None:
        """Modulate the trained layer: with scales of 1 and shifts of 0 nothing changes."""
        self.linear, self._adopted = base, True

    @property
    def base(self) -> nn.Module | None:
        """The trained layer that is kept; None where the linear layer is the layer's own."""
        return self.linear if self._adopted else None
