"""Composing a program for each row of the control: memory, controller and gates together.

Shapes: see `neurocoder.functional`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from neurocoder.conditional import Conditional
from neurocoder.functional import (
    attend,
    half_scores,
    only,
    product_score,
    program,
    score,
    sharpen,
    singular_values,
)
from neurocoder.precision import full_precision
from neurocoder.program.addressing import addressing
from neurocoder.program.composition import Composition
from neurocoder.program.controller import LstmController, build_controller
from neurocoder.program.gates import gate_features, residual_scale, state_gate
from neurocoder.program.kept import Kept, watched
from neurocoder.program.memory import ProgramMemory, SparseMemory
from neurocoder.program.options import OPTIONS, resolve
from neurocoder.program.search import choose


class Signals(NamedTuple):
    """What controller and gates say for each row of the control, before any sigmoid."""

    query_MKRN: Tensor
    gate: Tensor | None
    opening_N: Tensor | None  # of the residual program


class Composer(Conditional):
    """The parameters of a program-memory layer, and what it composes of them.

    Args:
        shape: of the plain layer's weight, (out, in, ...).
        own_features: width of what the controller looks at unless the options say otherwise.
        options: as in `Linear`, each of which may be left out.
    """

    store = "memory"
    wants: ClassVar = {"orthogonality": 0.1}
    size = "slots"
    spatial = False  # whether a program serves every position of an image
    residual: nn.Parameter | None
    integration_weight: nn.Parameter | None
    integration_bias: nn.Parameter | None
    bias: nn.Parameter | None
    gain: Tensor
    base: nn.Linear | nn.Conv2d | None
    _kept: Kept | None = None

    def __init__(
        self, shape: tuple[int, ...], own_features: int, bias: bool, options: Mapping[str, Any], factory: dict
    ):
        super().__init__()
        if not isinstance(bias, bool):
            raise TypeError(f"bias must be True or False, got {bias!r}")
        chosen = resolve(options)
        self.slots, self.heads, self.steps = chosen["slots"], chosen["heads"], chosen["steps"]
        self.key_dim, self.least_used, self.sharpness = chosen["key_dim"], chosen["least_used"], chosen["sharpness"]
        self.rules, self.controller_kind = chosen["rules"], chosen["controller"]
        self.controller_sees, residual = chosen["controller_sees"], chosen["residual"]
        self.addressing = addressing(chosen)
        seen = self.slots if self.controller_sees == "read" else own_features
        control_features = self.look_at(chosen["control_features"], seen)
        learned = self.rules.initial_state == "learned"
        shape_of_queries = (control_features, self.steps, self.heads, self.key_dim, len(self.addressing.banks))
        self.controller = build_controller(
            self.controller_kind, shape_of_queries, learned, self.addressing.fixed, **factory
        )
        self.memory = self._build_memory(prod(shape[1:]), shape[0], chosen["memory"], factory)
        own_gate = residual and self.rules.integration == "linear"
        if residual and not own_gate and not isinstance(self.controller, LstmController):
            raise ValueError("rules.integration='lstm' needs a recurrent controller, got controller='linear'")

        def parameter(*shape: int, when: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(*shape, **factory)) if when else None

        self.register_parameter("residual", parameter(*shape, when=residual))
        self.register_parameter("integration_weight", parameter(1, control_features, when=own_gate))
        self.register_parameter("integration_bias", parameter(1, when=own_gate))
        self.register_parameter("bias", parameter(shape[0], when=bias))
        self.register_buffer("gain", torch.ones((), **factory))
        self.base = None
        self._state_opens = residual and not own_gate
        self._gated = None if self.memory.gate_weight is None else self.rules.gate

    def _build_memory(self, width: int, height: int, given: ProgramMemory | None, factory: dict) -> ProgramMemory:
        # Usage is empty in the first step: with one step there is nothing to mix, and so no gate.
        gated = self.steps > 1 and self.least_used > 0
        seen = gate_features(self.rules, self.controller, self.control_features, self.heads) if gated else 0
        shape = (width, height, self.slots, self.key_dim, seen, self.rules, self.addressing)
        kind = SparseMemory if self.addressing.sparse else ProgramMemory
        if given is None:
            return kind(*shape, **factory)
        given.check_serves(kind(*shape, device="meta"), self.controller.weight)
        return given

    def options(self) -> dict[str, Any]:
        own = {"residual": self.residual is not None, "controller": self.controller_kind, "rules": asdict(self.rules)}
        own |= self.control_option() | self.addressing.options()
        names = [name for name in OPTIONS if name not in ("memory", "compat")]
        return {name: own[name] if name in own else getattr(self, name) for name in names}

    def own_dtype(self) -> torch.dtype:
        return self.memory.left.dtype

    def compose(self, control_NC: Tensor) -> Composition:
        """Attend to the memory for each row of the control (Eq. 8 to 15)."""
        query_MKRN, gate, opening_N = self._signals(control_NC.t())
        dtype = query_MKRN.dtype
        with full_precision(control_NC):
            score_MPRN, slots_MkRN = self._scores(query_MKRN)
            left, right, values = attend(score_MPRN, gate, self.heads, self.least_used, self.rules)
            sigma_RN = singular_values(self.memory.values.to(dtype), values, self.rules.order)
            residual_N = residual_scale(opening_N, sigma_RN, self.rules.order)
            return Composition(left, right, values, sigma_RN, residual_N, slots_MkRN)

    def _scores(self, query_MKRN: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores of all slots, and the slots that count: those of the others are minus infinity."""
        how, sharp = self.addressing, self._sharp_keys(query_MKRN.dtype)
        every = product_score(half_scores(query_MKRN, sharp)) if how.product_keys else score(query_MKRN, sharp)
        if how.top_k is None:
            return every, None
        slots_MkRN = choose(query_MKRN, sharp, how).slot_MkRN
        return only(every, slots_MkRN), slots_MkRN

    def coordinates(self, composition: Composition) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Programs in the coordinates of the memories, (N, P, P), and the memories: of slots that some component reads
        where it does not read all."""
        left, right = self.memory.left, self.memory.right
        if composition.slots_MkRN is not None and not watched():
            from_, to = ((a != 0).any(2).any(1) for a in (composition.left_PRN, composition.right_PRN))
            composition = composition._replace(
                left_PRN=composition.left_PRN[from_], right_PRN=composition.right_PRN[to]
            )
            left, right = left[from_], right[to]
        return composition.core(), (left, right)

    def composed(self, core: Tensor, banks: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The dense programs (..., I, O) of these coordinates (..., P, P), without what is residual or base."""
        left, right = (self.memory.left, self.memory.right) if banks is None else banks
        return program(core, left.to(core.dtype), right.to(core.dtype)) * self.gain

    def _signals(self, control_CN: Tensor) -> Signals:
        """What is linear in the control, then the queries (Eq. 9) and the gates (Eq. 14, 15)."""
        memory, dtype = self.memory, torch.promote_types(self.memory.left.dtype, torch.float32)
        signal_XN, gate, opening_N = _product(self.controller.weight, self.controller.bias, control_CN), None, None
        if self._gated == "input":
            gate = _product(memory.gate_weight.flatten(0, 1), memory.gate_bias.flatten(), control_CN).to(dtype)
            gate = gate.unflatten(0, (3, self.slots, 1))
        if self.integration_weight is not None:
            opening_N = _product(self.integration_weight, self.integration_bias, control_CN).to(dtype)[0]
        with full_precision(control_CN):
            query_MKRN, state_UJN = self.controller(signal_XN.to(dtype))
            if self._gated == "state":
                gate = state_gate(state_UJN, memory, self.heads)
            if self._state_opens:
                opening_N = state_UJN[-1, -1]
        return Signals(query_MKRN, gate, opening_N)

    def _sharp_keys(self, dtype: torch.dtype) -> Tensor:
        """Keys as `functional.score` takes them. Call it under full precision."""
        sharpness = self.sharpness / 2 if self.addressing.product_keys else self.sharpness
        return self._once("keys", lambda: sharpen(self.memory.keys().to(dtype), sharpness))

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """make(), or what it gave before, inside of `nc.cached`."""
        return make() if self._kept is None else self._kept.get(name, make)

    def extra_repr(self) -> str:
        return (
            f"slots={self.slots}, heads={self.heads}, steps={self.steps}, key_dim={self.key_dim}, "
            f"least_used={self.least_used}, residual={self.residual is not None}, bias={self.bias is not None}"
            f"{', controller_sees=read' if self.controller_sees == 'read' else ''}{self.addressing}"
        )


def _product(weight_XC: Tensor, bias_X: Tensor, control_CN: Tensor) -> Tensor:
    """What a linear map makes of every column of the control: (X, N)."""
    return torch.addmm(bias_X[:, None], weight_XC, control_CN)
