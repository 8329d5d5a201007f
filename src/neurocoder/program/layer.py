"""Composing a program for each input: what `Linear` and `Conv2d` share.

Shapes: see `neurocoder.functional`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from math import sqrt
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from neurocoder import functional
from neurocoder.conditional import Attention, Conditional, check_sizes
from neurocoder.functional import Rules
from neurocoder.program import initialise
from neurocoder.program.cached import Kept
from neurocoder.program.controller import LinearController, LstmController
from neurocoder.program.memory import ProgramMemory

_MANY = 16  # with so many rows a column, products of a transposed copy are twice as fast
_FEW = 64  # up to so many rows, several products are faster than a copy of several maps into one


def default_sharpness(key_dim: int, steps: int, compat: str | None) -> float:
    """3 for keys of length 5; the cosines of random directions shrink with the root of it.

    The authors multiply by 10 with several steps, and divide by K in any case: they expand the norms to K columns.
    """
    if compat is None:
        return 3.0 * sqrt(key_dim / 5)
    return (10.0 if steps > 1 else 1.0) / key_dim


class Signals(NamedTuple):
    """What the controller says for each row of the control; see `fused.compose_rows` for the first two."""

    query: Tensor
    recurrent: Tensor | None
    gate: Tensor | None
    opening_N: Tensor | None
    read_PN: Tensor | None


class Composition(NamedTuple):
    """A composed program in factored form, one a row of the control."""

    left_PRN: Tensor
    right_PRN: Tensor
    values_PRN: Tensor
    sigma_RN: Tensor
    residual_N: Tensor | None

    def core(self) -> Tensor:
        """The program in the coordinates of the memories: (N, P, P)."""
        return functional.coordinates(self.left_PRN, self.sigma_RN, self.right_PRN)


class ProgramLayer(Conditional):
    """A layer that composes its weights from a program memory. Use `Linear` or `Conv2d`; `Linear` says what each
    argument means."""

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
        self,
        program_in: int,
        program_out: int,
        residual_shape: tuple[int, ...],
        control: tuple[int | None, int],
        bias: bool,
        *,
        slots: int | None,
        heads: int,
        steps: int,
        key_dim: int,
        least_used: int,
        residual: bool,
        sharpness: float | None,
        controller: Literal["linear", "lstm"] | int | None,
        controller_sees: Literal["input", "read"],
        memory: ProgramMemory | None,
        compat: Literal["authors"] | None,
        rules: Rules | None,
        device,
        dtype,
    ):
        super().__init__()
        if memory is not None and not isinstance(memory, ProgramMemory):
            raise TypeError(f"memory takes an nc.ProgramMemory, got a {type(memory).__name__}")
        if slots is None:
            if memory is None:
                raise TypeError("give slots=, the number of singular programs in memory, e.g. slots=30; or memory=")
            slots = memory.slots
        given, own = control  # the width asked for, and that of the input
        self.controller_sees = self._check_sight(controller_sees, given)
        check_sizes(slots=slots, heads=heads, steps=steps, key_dim=key_dim)
        control_features = self.look_at(given, slots if controller_sees == "read" else own)
        if rules is not None and not isinstance(rules, Rules):
            raise TypeError(f"rules takes an nc.Rules, got {rules!r}; did you mean compat='authors'?")
        if not isinstance(bias, bool):
            raise TypeError(f"bias must be True or False, got {bias!r}")
        if type(least_used) is not int or not 0 <= least_used <= slots:
            raise ValueError(f"least_used must be a whole number between 0 and slots={slots}, got {least_used!r}")
        if compat not in (None, "authors"):
            raise ValueError(f"compat must be None or 'authors', got {compat!r}")
        if compat and rules:
            raise ValueError("compat and rules both choose the rules: give one of them")
        if sharpness is None:
            sharpness = default_sharpness(key_dim, steps, compat)
        if not 0 < sharpness < float("inf"):
            raise ValueError(f"sharpness must be a positive number, got {sharpness}")
        self.rules = Rules.authors(steps) if compat else rules or functional.PAPER
        self.slots, self.heads, self.steps, self.key_dim = slots, heads, steps, key_dim
        self.least_used, self.sharpness = least_used, sharpness
        self.controller_kind = ("lstm" if steps > 1 else "linear") if controller is None else controller
        factory = {"device": device, "dtype": dtype}
        self.controller = self._build_controller(factory)
        self.memory = self._build_memory(program_in, program_out, memory, factory)

        def parameter(*shape: int, when: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(*shape, **factory)) if when else None

        own_gate = residual and self.rules.integration == "linear"
        if residual and not own_gate and not isinstance(self.controller, LstmController):
            raise ValueError("rules.integration='lstm' needs a recurrent controller, got controller='linear'")
        self.register_parameter("residual", parameter(*residual_shape, when=residual))
        self.register_parameter("integration_weight", parameter(1, control_features, when=own_gate))
        self.register_parameter("integration_bias", parameter(1, when=own_gate))
        self.register_parameter("bias", parameter(program_out, when=bias))
        self.register_buffer("gain", torch.ones((), **factory))
        self._gated = None if self.memory.gate_weight is None else self.rules.gate
        self._state_opens = residual and not own_gate
        self._state_matters = self._state_opens or self._gated == "state"
        self.base = None
        initialise.layer(self, memory_too=memory is None)

    @staticmethod
    def _check_sight(controller_sees: str, control_features: int | None) -> str:
        if controller_sees not in ("input", "read"):
            raise ValueError(f"controller_sees must be 'input' or 'read', got {controller_sees!r}")
        if controller_sees == "read" and control_features is not None:
            raise ValueError(
                "with controller_sees='read' the controller looks at what the memory reads of x, with "
                f"control_features={control_features!r} at a control: give one of them"
            )
        return controller_sees

    def _build_controller(self, factory: dict) -> LinearController | LstmController:
        kind, shape = self.controller_kind, (self.control_features, self.steps, self.heads, self.key_dim)
        if kind == "linear":
            return LinearController(*shape, **factory)
        if kind == "lstm" or (type(kind) is int and kind > 0):
            units = None if kind == "lstm" else kind
            return LstmController(*shape, units, self.rules.initial_state == "learned", **factory)
        raise ValueError(f"controller must be 'linear', 'lstm' or a number of LSTM units, got {kind!r}")

    def _build_memory(self, width: int, height: int, given: ProgramMemory | None, factory: dict) -> ProgramMemory:
        # Usage is empty in the first step: with one step there is nothing to mix, and so no gate.
        gate_features = 0
        if self.steps > 1 and self.least_used > 0:
            gate_features = self.control_features
            if self.rules.gate == "state":
                if not isinstance(self.controller, LstmController):
                    raise ValueError("rules.gate='state' needs a recurrent controller, got controller='linear'")
                gate_features = self.heads * self.controller.units
        if given is not None:
            factory = {"device": "meta"}
        own = ProgramMemory(width, height, self.slots, self.key_dim, gate_features, self.rules, **factory)
        if given is None:
            return own
        weight = self.controller.weight
        if (given.left.dtype, given.left.device) != (weight.dtype, weight.device):
            raise ValueError(
                f"the given memory is {given.left.dtype} on {given.left.device}; "
                f"this layer is {weight.dtype} on {weight.device}"
            )
        if not given.fits(own):
            raise ValueError(
                f"the given memory has {given.extra_repr()}; "
                f"this layer needs {own.extra_repr()}, made by the same rules"
            )
        return given

    def reset_parameters(self) -> None:
        """Initialise anew, the memory included."""
        initialise.layer(self, memory_too=True)

    def adopt(self, base: nn.Linear | nn.Conv2d) -> None:
        """Add to `base` what is composed: y = base(x) + x P_t, which equals base(x) until M_V is trained.

        The caller freezes the base once it stands in the network.
        """
        self.base = base
        initialise.add_nothing(self)

    def become(self, old: nn.Linear | nn.Conv2d) -> None:
        """Start as `old` for every input, where there is a residual program to hold what the memory does not."""
        initialise.as_before(self, old)

    def options(self) -> dict[str, Any]:
        names = ("slots", "heads", "steps", "key_dim", "least_used", "sharpness")
        return {name: getattr(self, name) for name in names} | {
            "residual": self.residual is not None,
            "controller": self.controller_kind,
            "rules": asdict(self.rules),
            "controller_sees": self.controller_sees,
            **self.control_option(),
        }

    def _signals(self, control_NC: Tensor, read_PC: Tensor | None = None, unrolled: bool = True) -> Signals:
        """Everything that is linear in the control, then the queries (Eq. 9).

        A bank given as `read_PC` is multiplied along with the rest. Without `unrolled`, a signal of the controller that
        `fused.compose_rows` takes is left to it.
        """
        controller = self.controller
        dtype = torch.promote_types(self.memory.left.dtype, torch.float32)
        signal = self._linear_in(control_NC, read_PC)
        with functional.full_precision(control_NC):
            signal = {name: p if p.dtype == dtype else p.to(dtype) for name, p in signal.items()}
            query, recurrent, gate, opening_N = signal["query"], None, signal.get("gate"), None
            if gate is not None:
                gate = gate.unflatten(0, (3, self.slots, 1))
            if "opening" in signal:
                opening_N = signal["opening"][0]
            if unrolled or self._state_matters or not controller.direct:
                query, state_UJN = controller(query)
                gate = self._state_gate(state_UJN) if self._gated == "state" else gate
                if self._state_opens:
                    opening_N = state_UJN[-1, -1]
            elif controller.recurrent is not None:
                recurrent = controller.recurrent.to(dtype)
        return Signals(query, recurrent, gate, opening_N, signal.get("read"))

    def _linear_in(self, control_NC: Tensor, read_PC: Tensor | None) -> dict[str, Tensor]:
        """The products of the control with each map that looks at it, (..., N): one by one for few rows, where copying
        the maps together costs more than it saves, else all in one."""
        control_CN, rows = control_NC.t(), control_NC.shape[0]
        if not torch.compiler.is_compiling() and rows <= _FEW:
            return {
                name: weight @ control_CN if bias is None else torch.addmm(bias[:, None], weight, control_CN)
                for name, (weight, bias) in self._maps(read_PC).items()
            }
        if not torch.compiler.is_compiling() and rows > _MANY * control_CN.shape[0]:
            control_CN = control_CN.contiguous()
        name = "maps" if read_PC is None else "maps and read"
        weight, bias, sizes = self._once(name, lambda: self._together(self._maps(read_PC)))
        product_XN = torch.addmm(bias, weight, control_CN)
        return dict(zip(sizes, product_XN.split([*sizes.values()]), strict=True))

    def _maps(self, read_PC: Tensor | None) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Weight and bias of every map that looks at the control."""
        maps: dict[str, tuple[Tensor, Tensor | None]] = {"query": (self.controller.weight, self.controller.bias)}
        if read_PC is not None:
            maps["read"] = (read_PC, None)
        if self._gated == "input":
            maps["gate"] = (self.memory.gate_weight.flatten(0, 1), self.memory.gate_bias.flatten())
        if self.integration_weight is not None:
            maps["opening"] = (self.integration_weight, self.integration_bias)
        return maps

    def _together(self, maps: dict[str, tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor, dict[str, int]]:
        weights = [weight for weight, _ in maps.values()]
        biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in maps.values()]
        sizes = {name: len(weight) for name, (weight, _) in maps.items()}
        return torch.cat(weights), torch.cat(biases)[:, None], sizes

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        """make(), or what it gave before, inside of `nc.cached`."""
        return make() if self._kept is None else self._kept.get(name, make)

    def _state_gate(self, state_UJN: Tensor) -> Tensor:
        """Gates before their sigmoid, (M, P, R, N), where the controller's state decides them."""
        memory, dtype = self.memory, state_UJN.dtype
        weight_XU = memory.gate_weight.to(dtype).reshape(-1, self.controller.units)
        gate_XJN = (weight_XU @ state_UJN.flatten(1)).unflatten(1, state_UJN.shape[1:])
        gate_MPRN = gate_XJN.unflatten(0, (3, self.slots, self.heads)).transpose(2, 3).flatten(2, 3)
        return gate_MPRN + memory.gate_bias.to(dtype)[:, :, None, None]

    def _sharp_keys(self, dtype: torch.dtype) -> Tensor:
        """Keys as `functional.score` takes them. Call it under full precision."""
        return self._once("keys", lambda: functional.sharpen(self.memory.keys().to(dtype), self.sharpness))

    def compose(self, control_NC: Tensor) -> Composition:
        """Attend to the memory for each row of the control (Eq. 8 to 15)."""
        signals = self._signals(control_NC)
        dtype = signals.query.dtype
        with functional.full_precision(control_NC):
            score_MPRN = functional.score(signals.query, self._sharp_keys(dtype))
            left, right, values = functional.attend(score_MPRN, signals.gate, self.heads, self.least_used, self.rules)
            sigma_RN = functional.singular_values(self.memory.values.to(dtype), values, self.rules.order)
            return Composition(left, right, values, sigma_RN, self._residual_scale(signals.opening_N, sigma_RN))

    def _residual_scale(self, opening_N: Tensor | None, sigma_RN: Tensor) -> Tensor | None:
        """The multiplier of the residual program (Eq. 15): its gate times the smallest singular value."""
        if opening_N is None:
            return None
        return opening_N.sigmoid() * sigma_RN[0 if self.rules.order == "ascending" else -1]

    def _note(self, composition: Composition, lead: tuple[int, ...]) -> None:
        """Record a call with the leading shape of its control."""
        if self._calls is None:
            return
        *attention, sigma_RN, residual_N = composition
        left, right, values = (a.permute(2, 1, 0).reshape(*lead, *a.shape[1::-1]) for a in attention)
        sigma = sigma_RN.t().reshape(*lead, len(sigma_RN))
        residual = None if residual_N is None else residual_N.reshape(lead)
        self.record(Attention(left, right, values, sigma, residual))

    def composition(self, x: Tensor, control: Tensor | None = None) -> Composition:
        """The programs of the inputs in factored form."""
        raise NotImplementedError

    def composed(self, composition: Composition) -> Tensor:
        """The dense composed programs (N, I, O), without what is residual or base."""
        core_NPP = composition.core()
        left, right = self.memory.left.to(core_NPP.dtype), self.memory.right.to(core_NPP.dtype)
        return left.t() @ core_NPP @ right * self.gain

    def _programs(self, composition: Composition, based: bool = True) -> Tensor:
        """The dense working programs (N, I, O), with the base's weight if there is one."""
        program_NIO = self.composed(composition)
        if composition.residual_N is not None:
            program_NIO = program_NIO + composition.residual_N[:, None, None] * self.residual.flatten(1).t()
        return program_NIO if self.base is None or not based else program_NIO + self.base.weight.flatten(1).t()

    def own_dtype(self) -> torch.dtype:
        return self.memory.left.dtype

    def extra_repr(self) -> str:
        return (
            f"slots={self.slots}, heads={self.heads}, steps={self.steps}, key_dim={self.key_dim}, "
            f"least_used={self.least_used}, residual={self.residual is not None}, bias={self.bias is not None}"
            f"{', controller_sees=read' if self.controller_sees == 'read' else ''}"
        )
