"""The modular GRU (appendix A of Modular Networks). Shapes: B sequences, T steps, I in, H hidden."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder.conditional import check_sizes
from neurocoder.dispatch import Dispatch
from neurocoder.modular.layers import Linear
from neurocoder.precision import autocasting


class GRU(nn.Module):
    """A recurrent layer whose state update is a modular layer; called like `nn.GRU` with one layer.

    ::

        z_t = sigmoid(W_z [h_{t-1}, x_t]),  r_t = sigmoid(W_r [h_{t-1}, x_t])
        c_t = ReLU(sum_i f_{a_i}([r_t * h_{t-1}, x_t])),  a_t chosen by p(a_t | h_{t-1}, x_t)
        h_t = (1 - z_t) * h_{t-1} + z_t * c_t

    Args:
        input_size, hidden_size, bias, batch_first: as in `nn.GRU`.
        modules, choices, pool, dispatch: as in `nc.modular.Linear`; modules and controller serve all time steps.

    Shape:
        x (T, B, I), or (B, T, I) with batch_first; h_0 (1, B, H), zero if left out. Returns all states, and the last.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        batch_first: bool = False,
        *,
        modules: int,
        choices: int = 1,
        pool: nn.ModuleList | None = None,
        dispatch: Dispatch = "sparse",
        device=None,
        dtype=None,
    ):
        check_sizes(input_size=input_size, hidden_size=hidden_size)
        super().__init__()
        self.input_size, self.hidden_size, self.batch_first = input_size, hidden_size, batch_first
        both = input_size + hidden_size
        self.gates = nn.Linear(both, 2 * hidden_size, bias, device=device, dtype=dtype)
        self.candidate = Linear(
            both,
            hidden_size,
            bias,
            modules=modules,
            choices=choices,
            combine="sum",
            control_features=both,
            pool=pool,
            dispatch=dispatch,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor, h_0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        order = "batch, steps" if self.batch_first else "steps, batch"
        if not isinstance(x, Tensor):
            raise TypeError(f"nc.modular.GRU takes a tensor ({order}, {self.input_size}), got {type(x).__name__}")
        if x.dim() != 3 or x.shape[-1] != self.input_size:
            raise ValueError(f"expected x of shape ({order}, {self.input_size}), got {tuple(x.shape)}")
        if x.dtype != self.gates.weight.dtype and not autocasting(x):
            raise TypeError(f"this layer is {self.gates.weight.dtype}, got x of {x.dtype}: convert one of them")
        x_TBI = x.transpose(0, 1) if self.batch_first else x
        steps, batch, _ = x_TBI.shape
        if not steps:
            raise ValueError("a sequence has at least one step, got none")
        if h_0 is None:
            h_BH = x.new_zeros(batch, self.hidden_size)
        elif h_0.shape == (1, batch, self.hidden_size):
            h_BH = h_0[0]
        else:
            raise ValueError(f"expected h_0 of shape (1, {batch}, {self.hidden_size}), got {tuple(h_0.shape)}")
        weight_H, weight_I = self.gates.weight.split((self.hidden_size, self.input_size), 1)
        from_x = F.linear(x_TBI, weight_I, self.gates.bias)
        states = []
        for x_BI, gates_B2H in zip(x_TBI, from_x, strict=True):
            update_BH, reset_BH = (gates_B2H + F.linear(h_BH, weight_H)).sigmoid().tensor_split(2, -1)
            control = torch.cat((h_BH, x_BI), -1)
            candidate_BH = F.relu(self.candidate(torch.cat((reset_BH * h_BH, x_BI), -1), control=control))
            h_BH = torch.lerp(h_BH, candidate_BH.to(h_BH.dtype), update_BH.to(h_BH.dtype))
            states.append(h_BH)
        output = torch.stack(states, 1 if self.batch_first else 0)
        return output, h_BH[None]

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, batch_first={self.batch_first}"
