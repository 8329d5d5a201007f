"""The program controller's composition network (Eq. 9): from what it looks at to the queries of every component.

Its input weights stand open, so that a layer can multiply them with its input together with everything else that
looks at the same input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neurocoder.functional import lstm, queries


class LinearController(nn.Module):
    """Queries of all components as one linear map of the control: no recurrence."""

    def __init__(self, control_features: int, steps: int, heads: int, key_dim: int, device=None, dtype=None):
        super().__init__()
        self.shape = (3, key_dim, steps * heads)
        rows = 3 * key_dim * steps * heads
        self.weight = nn.Parameter(torch.empty(rows, control_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))

    def forward(self, signal_XN: Tensor) -> tuple[Tensor, None]:
        """From weight @ control + bias to the queries (M, K, R, N)."""
        return signal_XN.reshape(*self.shape, signal_XN.shape[1]), None


class LstmController(nn.Module):
    """An LSTM that sees the same input at each of `steps` steps; its output is the queries of that step's heads.

    With `units=None` it has 3 * heads * key_dim + 1 units and its output *is* the queries (the last unit is the
    residual gate, where the rules say so): the shape that gives the published model sizes. With another number of
    units a linear map of the state gives the queries.

    Since the input does not change, its part of the LSTM's signal is computed once, not once a step.
    """

    recurrent: nn.Parameter | None
    query: nn.Parameter | None
    recurrent_bias: nn.Parameter | None
    state: nn.Parameter | None

    def __init__(
        self,
        control_features: int,
        steps: int,
        heads: int,
        key_dim: int,
        units: int | None = None,
        learned_state: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.steps, self.heads, self.key_dim = steps, heads, key_dim
        width = 3 * heads * key_dim
        self.units = width + 1 if units is None else units

        def parameter(*shape: int, when: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype)) if when else None

        self.weight = nn.Parameter(torch.empty(4 * self.units, control_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(4 * self.units, device=device, dtype=dtype))
        again = steps > 1 or learned_state  # a single step from a zero state never looks back
        self.register_parameter("recurrent", parameter(4 * self.units, self.units, when=again))
        self.register_parameter("query", parameter(width, self.units, when=units is not None))
        # A learned state and a second bias exist only as in the authors' code, whose sizes were published.
        self.register_parameter("recurrent_bias", parameter(4 * self.units, when=learned_state))
        self.register_parameter("state", parameter(2, self.units, when=learned_state))

    def forward(self, signal_XN: Tensor) -> tuple[Tensor, Tensor]:
        """From weight @ control + bias to the queries (M, K, R, N) and the state of every step (U, J, N)."""
        dtype, start = signal_XN.dtype, None
        if self.state is not None and self.recurrent_bias is not None:
            signal_XN = signal_XN + self.recurrent_bias.to(dtype)[:, None]
            start = self.state.to(dtype)[:, :, None].expand(2, self.units, signal_XN.shape[1])
        recurrent = None if self.recurrent is None else self.recurrent.to(dtype)
        state_UJN = lstm(signal_XN, recurrent, self.steps, start)
        said_XJN = state_UJN
        if self.query is not None:
            said_XJN = (self.query.to(dtype) @ state_UJN.flatten(1)).unflatten(1, state_UJN.shape[1:])
        return queries(said_XJN, self.key_dim, self.heads), state_UJN


def build_controller(
    kind: str | int, control_features: int, steps: int, heads: int, key_dim: int, learned_state: bool, **factory: Any
) -> LinearController | LstmController:
    """The controller of that kind: "linear", "lstm", or a number of LSTM units."""
    if kind == "linear":
        return LinearController(control_features, steps, heads, key_dim, **factory)
    if kind == "lstm" or (type(kind) is int and kind > 0):
        units = None if kind == "lstm" else kind
        return LstmController(control_features, steps, heads, key_dim, units, learned_state, **factory)
    raise ValueError(f"controller must be 'linear', 'lstm' or a number of LSTM units, got {kind!r}")
