"""The program controller's composition network (Eq. 9): from what it looks at to the queries of every component.

Its input weights stand open, so that a layer can multiply them with its input together with everything else that
looks at the same input.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from neurocoder.functional import lstm, queries


class LinearController(nn.Module):
    """Queries of all components as one linear map of the control: no recurrence."""

    def __init__(
        self, control_features: int, steps: int, heads: int, key_dim: int, banks: int = 3, device=None, dtype=None
    ):
        super().__init__()
        self.shape = (banks, key_dim, steps * heads)
        rows = prod(self.shape)
        self.weight = nn.Parameter(torch.empty(rows, control_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))

    def forward(self, signal_XN: Tensor) -> tuple[Tensor, None]:
        """From weight @ control + bias to the queries (M, K, R, N)."""
        return signal_XN.reshape(*self.shape, signal_XN.shape[1]), None


class LstmController(nn.Module):
    """An LSTM that sees the same input at each of `steps` steps; its output is the queries of that step's heads.

    With `units=None` it has banks * heads * key_dim + 1 units and its output *is* the queries (the last unit is the
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
        banks: int = 3,
        units: int | None = None,
        learned_state: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.steps, self.heads, self.key_dim, self.banks = steps, heads, key_dim, banks
        width = banks * heads * key_dim
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
        return queries(said_XJN, self.key_dim, self.heads, self.banks), state_UJN


def build_controller(
    kind: str | int, shape: tuple[int, int, int, int, int], learned_state: bool, fixed: bool, **factory: Any
) -> LinearController | LstmController:
    """The controller of that kind: "linear", "lstm", or a number of LSTM units. A fixed one has buffers only.

    Args:
        shape: control features, steps, heads, the length of a key, and banks.
    """
    if kind == "linear":
        controller = LinearController(*shape, **factory)
    elif kind == "lstm" or (type(kind) is int and kind > 0):
        controller = LstmController(*shape, None if kind == "lstm" else kind, learned_state, **factory)
    else:
        raise ValueError(f"controller must be 'linear', 'lstm' or a number of LSTM units, got {kind!r}")
    for name, parameter in [*controller.named_parameters()] if fixed else ():
        delattr(controller, name)
        controller.register_buffer(name, parameter.detach())
    return controller
