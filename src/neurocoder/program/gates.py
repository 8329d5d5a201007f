"""The gates of a program-memory layer: of its slots (Eq. 14), and of its residual program (Eq. 15).

Shapes: see `neurocoder.functional`.
"""

from __future__ import annotations

from torch import Tensor

from neurocoder.functional import Rules
from neurocoder.program.controller import LinearController, LstmController
from neurocoder.program.memory import ProgramMemory


def gate_features(
    rules: Rules, controller: LinearController | LstmController, control_features: int, heads: int
) -> int:
    """The width of what the slot gates look at: the control, or the controller's state."""
    if rules.gate == "input":
        return control_features
    if not isinstance(controller, LstmController):
        raise ValueError("rules.gate='state' needs a recurrent controller, got controller='linear'")
    return heads * controller.units


def state_gate(state_UJN: Tensor, memory: ProgramMemory, heads: int) -> Tensor:
    """Slot gates before their sigmoid, (M, P, R, N), where the controller's state decides them."""
    dtype = state_UJN.dtype
    weight_XU = memory.gate_weight.to(dtype).reshape(-1, len(state_UJN))
    gate_XJN = (weight_XU @ state_UJN.flatten(1)).unflatten(1, state_UJN.shape[1:])
    gate_MPRN = gate_XJN.unflatten(0, (3, memory.slots, heads)).transpose(2, 3).flatten(2, 3)
    return gate_MPRN + memory.gate_bias.to(dtype)[:, :, None, None]


def residual_scale(opening_N: Tensor | None, sigma_RN: Tensor, order: str) -> Tensor | None:
    """The multiplier of the residual program (Eq. 15): its gate times the smallest singular value."""
    return None if opening_N is None else opening_N.sigmoid() * sigma_RN[0 if order == "ascending" else -1]
