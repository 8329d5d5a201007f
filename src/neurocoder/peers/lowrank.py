"""The static peer: what a layer of the same size does without conditions.

Shapes: Y rows, I in, O out, R rank.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder.conditional import check_sizes, register
from neurocoder.peers.peer import Peer
from neurocoder.records import Reading


@register("peers.LowRank")
class LowRank(Peer):
    """y = x A B + b, the same for every x: a program-memory layer with nothing to choose, or LoRA with base="frozen".

    A control is taken and not looked at, so that the layer can stand where a conditional one stood. It starts with the
    output variance of an `nn.Linear`.

    Args:
        in_features, out_features, bias: as in `nn.Linear`.
        rank: columns of A and rows of B.

    Attributes:
        left (rank, in_features), right (rank, out_features): the transpose of A, and B, as a program memory has them.
        base: with base="frozen", the trained layer: y = base(x) + x A B, where B starts at zero.
    """

    size = "rank"
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        rank: int,
        device=None,
        dtype=None,
    ):
        check_sizes(rank=rank)
        super().__init__(in_features, out_features)
        factory = {"device": device, "dtype": dtype}
        self.left = nn.Parameter(torch.empty(rank, in_features, **factory))
        self.right = nn.Parameter(torch.empty(rank, out_features, **factory))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, **factory)) if bias else None)
        self.base = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Unit-variance input reads as unit variance; then B is scaled so that A B is as large as a fresh weight."""
        nn.init.normal_(self.left, std=1 / sqrt(self.in_features))
        nn.init.normal_(self.right)
        left, right = (bank.to(torch.promote_types(bank.dtype, torch.float32)) for bank in (self.left, self.right))
        squared = ((left @ left.t()) * (right @ right.t())).sum()
        self.right.mul_((self.out_features / 3 / squared).sqrt())
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / sqrt(self.in_features), 1 / sqrt(self.in_features))
        if self.base is not None:
            nn.init.zeros_(self.right)

    def adopt(self, base: nn.Linear | nn.Conv2d) -> None:
        """Add to the trained layer, y = base(x) + x A B: nothing until B is trained."""
        self.base = base
        nn.init.zeros_(self.right)

    def options(self) -> dict[str, Any]:
        return {"rank": len(self.left)}

    def forward(self, x: Tensor, control: Tensor | None = None) -> Tensor:
        return super().forward(x)

    def rows(self, x_YI: Tensor, control_NC: Tensor, lead: tuple[int, ...]) -> Tensor:
        read_YR = F.linear(x_YI, self.left)
        if self.watched:
            self.record(Reading((read_YR.abs() * self.right.norm(dim=1)).reshape(*lead, len(self.left))))
        y = read_YR @ self.right if self.bias is None else torch.addmm(self.bias, read_YR, self.right)
        return y if self.base is None else y + self.base(x_YI)
