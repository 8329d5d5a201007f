"""Neural Stored-program Memory: H. Le, T. Tran and S. Venkatesh, Neural Stored-program Memory, ICLR 2020.

Shapes: Y rows, I in, O out, N rows of what the query looks at, C features of it, P programs, K key.
"""

from __future__ import annotations

from functools import reduce
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder.conditional import check_sizes, register
from neurocoder.functional import EPSILON
from neurocoder.peers.peer import Peer
from neurocoder.precision import full_precision
from neurocoder.records import Mixture


@register("peers.StoredProgramMemory")
class StoredProgramMemory(Peer):
    """y = x W_t + b_t with (W_t, b_t) = sum_i w_ti (W_i, b_i): whole weight matrices are the stored programs.

    w_t = softmax(beta_t cos(q_t, k_i)), query q_t = tanh(x W_q + b_q), keys tanh(k_i), strength
    beta_t = softplus(x w_s + b_s). What is mixed are the programs' outputs, so there is no tensor of size
    batch * in * out. Programs start `sqrt(programs)` times as large as an `nn.Linear`, so that an even mixture of them
    has its variance.

    Args:
        programs: weight matrices, each with a bias, in memory.
        key_dim: length of a key.
        control_features: width of `control`, where the query and its strength look at something other than x.
    """

    size = "programs"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        programs: int,
        key_dim: int = 10,
        control_features: int | None = None,
        device=None,
        dtype=None,
    ):
        check_sizes(programs=programs, key_dim=key_dim)
        super().__init__(in_features, out_features, control_features)
        factory = {"device": device, "dtype": dtype}
        self.programs = nn.ModuleList(nn.Linear(in_features, out_features, bias, **factory) for _ in range(programs))
        self.key = nn.Parameter(torch.empty(programs, key_dim, **factory))
        self.query = nn.Linear(self.control_features, key_dim + 1, **factory)  # the last unit is the strength
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.key)
        self.query.reset_parameters()
        for program in self.programs:
            program.reset_parameters()
            with torch.no_grad():
                for parameter in program.parameters():
                    parameter.mul_(sqrt(len(self.programs)))

    def options(self) -> dict[str, Any]:
        return {"programs": len(self.key), "key_dim": self.key.shape[1], **self.control_option()}

    def rows(self, x_YI: Tensor, control_NC: Tensor, lead: tuple[int, ...]) -> Tensor:
        weight_NP = self.attend(control_NC, self.key)
        self.record(Mixture(weight_NP.reshape(*lead, len(self.key)), None))
        weight_YP = self.spread(weight_NP, x_YI)
        outputs = [program(x_YI) for program in self.programs]
        return reduce(torch.add, map(torch.mul, weight_YP.to(outputs[0].dtype).split(1, 1), outputs))

    def attend(self, control_NC: Tensor, key_PK: Tensor) -> Tensor:
        """Attention of each row of the control to the programs with these keys: (N, P)."""
        raw = self.query(control_NC)
        with full_precision(control_NC):
            raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
            query_NK = F.normalize(raw[:, :-1].tanh(), dim=-1, eps=EPSILON)
            key_PK = F.normalize(key_PK.to(raw.dtype).tanh(), dim=-1, eps=EPSILON)
            return (F.softplus(raw[:, -1:]) * (query_NK @ key_PK.t())).softmax(-1)
