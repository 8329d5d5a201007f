"""What the peers have in common: rows in, rows out."""

from __future__ import annotations

from torch import Tensor

from neurocoder.conditional import Conditional, check_sizes


class Peer(Conditional):
    """A layer from (..., in_features) to (..., out_features) that treats every row by itself.

    Args:
        control_features: width of `control`, where what decides looks at something other than x.
    """

    home = "nc.peers"

    def __init__(self, in_features: int, out_features: int, control_features: int | None = None):
        check_sizes(in_features=in_features, out_features=out_features)
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.look_at(control_features, in_features)

    def forward(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        lead, x_YI, control_NC = self.arrange(x, control)
        return self.rows(x_YI, control_NC, lead).reshape(*x.shape[:-1], self.out_features)

    def rows(self, x_YI: Tensor, control_NC: Tensor, lead: tuple[int, ...]) -> Tensor:
        """The output of each row of x; `lead` is the leading shape of the control, for the record of the call."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items() if value is not None)
        return f"in_features={self.in_features}, out_features={self.out_features}, {options}"
