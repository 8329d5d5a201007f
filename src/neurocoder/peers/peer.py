"""What the peers have in common: rows in, rows out."""

from __future__ import annotations

from torch import Tensor

from neurocoder.conditional import Conditional, check_sizes


class Peer(Conditional):
    """A layer from (..., in_features) to (..., out_features) that treats every row by itself."""

    home = "nc.peers"

    def __init__(self, in_features: int, out_features: int):
        check_sizes(in_features=in_features, out_features=out_features)
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        self.check(x, -1, self.in_features)
        y_YO = self.rows(x.reshape(-1, self.in_features), x.shape[:-1])
        return y_YO.reshape(*x.shape[:-1], self.out_features)

    def rows(self, x_YI: Tensor, lead: tuple[int, ...]) -> Tensor:
        """The output of each row; `lead` is the leading shape they came in, for the record of the call."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"in_features={self.in_features}, out_features={self.out_features}, {options}"
