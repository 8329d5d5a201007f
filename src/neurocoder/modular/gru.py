"""The modular GRU (appendix A of Modular Networks). Shapes: B sequences, T steps, I in, H hidden, M modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder.conditional import check_sizes
from neurocoder.dispatch import Dispatch, check_dispatch, picked, side_by_side
from neurocoder.modular.layers import Linear, check_activation
from neurocoder.precision import autocasting

Candidate = Callable[[int, Tensor, Tensor], Tensor]


class GRU(nn.Module):
    """A recurrent layer whose state update is a modular layer; called like `nn.GRU` with one layer.

    ::

        z_t = sigmoid(W_z [h_{t-1}, x_t]),  r_t = sigmoid(W_r [h_{t-1}, x_t])
        c_t = ReLU(sum_i f_{a_i}([r_t * h_{t-1}, x_t])),  a_t chosen by p(a_t | h_{t-1}, x_t)
        h_t = (1 - z_t) * h_{t-1} + z_t * c_t

    Args:
        input_size, hidden_size, bias, batch_first: as in `nn.GRU`.
        modules, activation, pool, dispatch: as in `nc.modular.Linear`; modules and controller serve all time steps.
            "dense" is the faster where modules are small: one product has what all of them make of all steps.
        choices: as in `nc.modular.Linear`; None: nothing is chosen, every step applies all modules (the paper's
            baseline), and there is no controller and no pool to share.

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
        choices: int | None = 1,
        activation: Literal["relu"] | None = None,
        pool: nn.ModuleList | None = None,
        dispatch: Dispatch = "sparse",
        device=None,
        dtype=None,
    ):
        check_sizes(input_size=input_size, hidden_size=hidden_size, modules=modules)
        check_activation(activation)
        check_dispatch(dispatch)
        super().__init__()
        self.input_size, self.hidden_size, self.batch_first = input_size, hidden_size, batch_first
        both = input_size + hidden_size
        self.gates = nn.Linear(both, 2 * hidden_size, bias, device=device, dtype=dtype)
        if choices is None:
            if pool is not None:
                raise ValueError("choices=None chooses nothing from a pool: leave pool out")
            self.activation = activation
            self.candidate = nn.Linear(both, modules * hidden_size, bias, device=device, dtype=dtype)
            return
        self.candidate = Linear(
            both,
            hidden_size,
            bias,
            modules=modules,
            choices=choices,
            combine="sum",
            activation=activation,
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
        gates, candidate = self._halves(x_TBI, self.gates.weight, self.gates.bias), self._candidate(x_TBI)
        states = []
        for step in range(steps):
            update_BH, reset_BH = gates(step, h_BH).sigmoid().tensor_split(2, -1)
            candidate_BH = F.relu(candidate(step, h_BH, reset_BH * h_BH))
            h_BH = torch.lerp(h_BH, candidate_BH.to(h_BH.dtype), update_BH.to(h_BH.dtype))
            states.append(h_BH)
        output = torch.stack(states, 1 if self.batch_first else 0)
        return output, h_BH[None]

    def _halves(self, x_TBI: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[int, Tensor], Tensor]:
        """The linear map of [h, x_t] as a function of t and h: what x gives is computed for all steps at once."""
        weight_H, weight_I = weight.split((self.hidden_size, self.input_size), 1)
        from_x, across = F.linear(x_TBI, weight_I, bias).unbind(0), weight_H.t()
        return lambda step, h_BH: torch.addmm(from_x[step], h_BH, across)

    def _candidate(self, x_TBI: Tensor) -> Candidate:
        """What the modules make of step t, given the state and what the reset gate leaves of it."""
        layer = self.candidate
        if not isinstance(layer, Linear):
            made = self._halves(x_TBI, layer.weight, layer.bias)
            return lambda step, h_BH, left_BH: self._sum_of_all(made(step, left_BH))
        if layer.dispatch == "sparse" or any(type(module) is not nn.Linear for module in layer.pool):
            return lambda step, h_BH, left_BH: layer(
                torch.cat((left_BH, x_TBI[step]), -1), control=torch.cat((h_BH, x_TBI[step]), -1)
            )
        every = self._halves(x_TBI, *side_by_side(layer.pool))
        logits = self._halves(x_TBI, layer.controller.weight, layer.controller.bias)

        def candidate(step: int, h_BH: Tensor, left_BH: Tensor) -> Tensor:
            chosen_BKk, weights_BKk = layer.choose(logits(step, h_BH))
            made_BMH = every(step, left_BH).unflatten(-1, (-1, self.hidden_size))
            return layer.combined(picked(made_BMH, chosen_BKk.flatten(1)), chosen_BKk, weights_BKk)

        return candidate

    def _sum_of_all(self, made: Tensor) -> Tensor:
        if made.shape[-1] == self.hidden_size:  # one module: ReLU comes after the sum in any case
            return made
        made = made if self.activation is None else F.relu(made)
        return made.unflatten(-1, (-1, self.hidden_size)).sum(-2)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, batch_first={self.batch_first}"
