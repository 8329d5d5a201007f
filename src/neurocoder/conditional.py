"""What every conditional layer is, and what it records of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor, nn

from neurocoder.functional import autocasting

Kind = TypeVar("Kind", bound=type)

# what `recode` takes from the plain layer, by its kind, and hands to the constructor beside bias, device and dtype
SHAPES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("in_features", "out_features"),
    nn.Conv2d: (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "padding_mode",
    ),
}


class Record:
    """What one call of a layer did with each of its inputs: a frozen dataclass of tensors (None: there is none).

    Every field begins with the leading shape of what the layer looked at, one place an input.
    """

    def use(self) -> Tensor | dict[str, Tensor]:
        """How much each input used each part of what the layer stores, (..., parts), none below 0: what `diagnose`
        looks at. Where there are banks of parts, one such tensor a bank, all of one shape."""
        raise NotImplementedError

    def rows(self) -> Record:
        """The same with one leading dimension, the inputs."""
        use = self.use()
        lead = (next(iter(use.values())) if isinstance(use, dict) else use).shape[:-1]
        return self._map(lambda value: value.reshape(lead.numel(), *value.shape[len(lead) :]))

    def where(self, mask: Tensor) -> Record:
        """The inputs for which the mask is true; its shape begins that of every field."""
        return self._map(lambda value: value[mask])

    def _map(self, change: Callable[[Tensor], Tensor]) -> Record:
        return type(self)(**{name: None if value is None else change(value) for name, value in vars(self).items()})

    def __repr__(self) -> str:
        shapes = (f"{name} {tuple(value.shape)}" for name, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({', '.join(shapes)})"


def combined(records: Sequence[Record], how: Callable[[list[Tensor]], Tensor]) -> Record:
    """One record of several of one kind: each field is `how` (`torch.stack`, `torch.cat`) of theirs."""
    fields = {name: [vars(record)[name] for record in records] for name in vars(records[0])}
    return type(records[0])(**{name: None if values[0] is None else how(values) for name, values in fields.items()})


def shares(use: Tensor) -> Tensor:
    """Normalised to sum to 1 over the parts: gated attention does not, nor do scales."""
    return use / use.sum(-1, keepdim=True).clamp_min(1e-12)


@dataclass(frozen=True, repr=False)
class Attention(Record):
    """What one call of a program-memory layer attended to; the leading dimensions are those of its control.

    Attributes:
        left, right, values: attention to the three banks, (..., components, slots). Gated attention does not sum to 1.
        sigma: the singular values, (..., components), positive and strictly decreasing (ascending where the rules say).
        residual: multiplier of the residual program, (...); None if the layer has none.
    """

    left: Tensor
    right: Tensor
    values: Tensor
    sigma: Tensor
    residual: Tensor | None

    def use(self) -> dict[str, Tensor]:
        banks = {"left": self.left, "right": self.right, "values": self.values}
        return {bank: shares(attention).mean(-2) for bank, attention in banks.items()}


@dataclass(frozen=True, repr=False)
class Mixture(Record):
    """How one call of a mixture of experts or a stored-program memory weighed what it stores.

    Attributes:
        weights: (..., parts), summing to 1; 0 for an expert that was not computed.
        chosen: the experts that were computed, (..., top_k); None where all programs are.
    """

    weights: Tensor
    chosen: Tensor | None

    def use(self) -> Tensor:
        return self.weights


@dataclass(frozen=True, repr=False)
class Choice(Record):
    """What one call of a modular layer chose.

    Attributes:
        probability: of each module, for each choice, (..., choices, modules).
        chosen: the modules it used, (..., choices, 1); several where it mixed them, (..., choices, mixed).
    """

    probability: Tensor
    chosen: Tensor

    def use(self) -> Tensor:
        return self.probability.mean(-2)


@dataclass(frozen=True, repr=False)
class Modulation(Record):
    """How one call of a HyperNet scaled its inputs, or of a FiLM scaled and shifted its outputs.

    Attributes:
        scale: (..., features).
        shift: (..., features); None for a HyperNet.
    """

    scale: Tensor
    shift: Tensor | None

    def use(self) -> Tensor:
        return self.scale.abs()


@dataclass(frozen=True, repr=False)
class Reading(Record):
    """What one call of a low-rank layer read of its inputs; none of it decides what the layer computes.

    Attributes:
        strength: the length of what each component added to the output, (..., rank).
    """

    strength: Tensor

    def use(self) -> Tensor:
        return self.strength


class Conditional(nn.Module):
    """A layer whose computation depends on its input. Every layer of this library is one, and yours can be: `recode`,
    `trace`, `diagnose`, `auxiliary`, `controlled`, `save` and `load` know no more of a layer than what stands here.
    docs/guides/peers.md has an example.

    A subclass must define

    - `__init__`: takes what the plain layer takes (see `replaces`), by keyword, and its own options after it:
      `(in_features, out_features, bias=True, *, ..., device=None, dtype=None)`; it keeps the former as attributes of
      the same names (without `bias`).
    - `options()`: the own options as they are now, fit for JSON, so that `load` can build the layer anew.
    - `forward(x, control=None)`: where `self.watched`, it calls `self.record` with an `nc.Mixture` (weights of parts),
      `nc.Choice`, `nc.Modulation`, or an `nc.Record` of its own that defines `use()`.

    It may define

    - `wants` and `auxiliary()`: losses to be added to the task's, for `nc.auxiliary`. What a forward keeps for it must
      not be part of a copy (`__getstate__`): a tensor with a graph cannot be copied.
    - `adopt(base)`: for `recode(..., base="frozen")`.

    For a control it calls `look_at` in `__init__`, and `arrange` and `spread` in `forward` (a convolution: `given`).
    `nc.register` lets `save` and `load` know it.

    Class attributes:
        home: where users find the class; by default the module that defines it.
        replaces: the plain layer it stands for, `nn.Linear` or `nn.Conv2d`.
        convolution: the class that stands for a convolution where this one stands for a linear layer.
        store: the attribute, and option, that holds what several layers may share: a module. It may have an
            `auxiliary()` of its own, asked once however many share it.
        wants: the kinds of loss that the layer or its store wants added, each with the weight it has by default.
        size: the option that decides how large a layer is.
    """

    home = "nc"
    replaces: type[nn.Module] = nn.Linear
    convolution: type[Conditional] | None = None
    store: str | None = None
    wants: ClassVar[dict[str, float]] = {}
    size: str | None = None

    controlled = False
    control_features: int
    in_features: int
    replaced: int | None = None  # parameters of the plain layer that it replaced
    _calls: list | None = None
    _control: Tensor | None = None

    def __init_subclass__(cls, **arguments: Any):
        super().__init_subclass__(**arguments)
        if "home" not in vars(cls) and cls.__module__.split(".")[0] != __name__.split(".")[0]:
            cls.home = cls.__module__
        if cls.replaces not in SHAPES:
            raise TypeError(f"{cls.__name__}.replaces must be nn.Linear or nn.Conv2d, got {cls.replaces!r}")

    def options(self) -> dict[str, Any]:
        """Keyword arguments, fit for JSON, that build this layer anew beside those of the layer it replaces."""
        raise NotImplementedError

    def auxiliary(self) -> dict[str, Tensor]:
        """What the layer wants added to the loss, a scalar for each kind in `wants` that it has to give now."""
        return {}

    def adopt(self, base: nn.Linear | nn.Conv2d) -> None:
        """Keep the trained layer `base` as `self.base`, and start as exactly what it computes. `recode` freezes it."""
        raise TypeError(f"base='frozen' needs a layer that can start as the one it replaces; {self.name()} cannot")

    @property
    def watched(self) -> bool:
        """Whether somebody traces the layer, and a call is to be recorded."""
        return self._calls is not None

    def record(self, call: Record) -> None:
        """Let whoever traces the layer see this call."""
        if self._calls is not None:
            self._calls.append(call)

    def look_at(self, control_features: int | None, own: int) -> int:
        """What decides looks at a control of that width; None: at the input itself. Returns the width."""
        if control_features is not None:
            check_sizes(control_features=control_features)
        self.controlled, self.control_features = control_features is not None, control_features or own
        return self.control_features

    def control_option(self) -> dict[str, int | None]:
        """`control_features` as the constructor was given it, for `options`."""
        return {"control_features": self.control_features if self.controlled else None}

    def given(self, control: Tensor | None) -> Tensor | None:
        """The control of a call, or that of `with nc.controlled(...)`; raises if the layer needs one and has none."""
        control = self._control if control is None else control
        if control is None and self.controlled:
            raise ValueError(
                f"this layer was built with control_features={self.control_features}: "
                f"call it with control=, of shape (..., {self.control_features}), or inside of nc.controlled"
            )
        return control

    def arrange(self, x: Tensor, control: Tensor | None) -> tuple[tuple[int, ...], Tensor, Tensor]:
        """The leading shape of what decides, the rows of x (Y, in_features), and those of the control (N, C), each of
        which serves Y / N rows of x in turn (see `spread`). Without a control, the rows of x are both."""
        self.check(x, -1, self.in_features)
        x_YI, control = x if x.dim() == 2 else x.reshape(-1, self.in_features), self.given(control)
        if control is None:
            return x.shape[:-1], x_YI, x_YI
        self.check(control, -1, self.control_features, "control")
        lead = control.shape[:-1]
        if x.shape[: len(lead)] != lead or x.dim() - 1 < len(lead):
            raise ValueError(
                f"the leading shape of control, {tuple(lead)}, must begin that of x, {tuple(x.shape[:-1])}"
            )
        return lead, x_YI, control.reshape(-1, self.control_features)

    @staticmethod
    def spread(value_N: Tensor, x_YI: Tensor) -> Tensor:
        """From one place a row of the control to one a row of x, each the same number of times."""
        count, rows = value_N.shape[0], x_YI.shape[0]  # len() would fix the size of an exported batch
        return value_N if count == rows else value_N.repeat_interleave(rows // max(1, count), 0)

    def plain_size(self) -> int:
        """Parameters of the plain layer that it replaced, or, where it was built by itself, of one of its shape."""
        if self.replaced is not None:
            return self.replaced
        shape = {name: getattr(self, name) for name in SHAPES[self.replaces]}
        plain = self.replaces(**shape, bias=True, device="meta")
        parts = {name: p.shape for name, p in self.named_parameters() if name.rpartition(".")[2] == "bias"}
        biased = "bias" in parts if hasattr(self, "bias") else plain.bias.shape in parts.values()
        return plain.weight.numel() + (plain.bias.numel() if biased else 0)

    @classmethod
    def name(cls) -> str:
        """As users write it."""
        return f"{cls.home}.{cls.__name__}"

    def own_dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def check(self, x: Tensor, axis: int, size: int, what: str = "x") -> None:
        """Raise unless x is what the layer takes: numbers of its type, `size` of them along the axis."""
        name = self.name()
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} takes a tensor, got {what} of type {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(
                f"{name} takes floating point numbers, got {what} of {x.dtype}: convert it first, e.g. {what}.float()"
            )
        if x.dim() < -axis or x.shape[axis] != size:
            wanted = f"(..., {size})" if axis == -1 else f"(batch, {size}, height, width)"
            raise ValueError(f"{name} expects {what} of shape {wanted}, got {tuple(x.shape)}")
        own = self.own_dtype()
        if x.dtype != own and not autocasting(x):
            raise TypeError(f"this layer is {own}, got {what} of {x.dtype}: convert one of them")


def check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if type(size) is not int:
            raise TypeError(f"{name} must be a whole number, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


KINDS: dict[str, type[Conditional]] = {}


@overload
def register(what: str) -> Callable[[Kind], Kind]: ...
@overload
def register(what: Kind) -> Kind: ...
def register(what: Any) -> Any:
    """Let `save` and `load` know a class of conditional layers, by its module and name or by a name of your choice::

        @nc.register                    # or @nc.register("mypackage.Mine"), a name to keep when the class moves
        class Mine(nc.Conditional): ...

    A file holds that name. Loading it imports nothing: the package that registers the class must have been imported.
    """
    if isinstance(what, str):
        return lambda kind: _register(kind, what)
    return _register(what, f"{getattr(what, '__module__', '')}.{getattr(what, '__qualname__', '')}")


def _register(kind: type[Conditional], name: str) -> type[Conditional]:
    if not (isinstance(kind, type) and issubclass(kind, Conditional)):
        raise TypeError(f"register takes a subclass of nc.Conditional, or a name for the class below it; got {kind!r}")
    takes = signature(kind).parameters
    missing = [word for word in (*SHAPES[kind.replaces], "bias", "device", "dtype") if word not in takes]
    if missing and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        raise TypeError(f"the constructor of {kind.__name__} must take {', '.join(missing)}: recode passes them")
    if kind.options is Conditional.options:
        raise TypeError(f"{kind.__name__} must define options(), from which load builds it anew")
    other = KINDS.get(name, kind)
    if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"{name!r} is taken by {other.__module__}.{other.__qualname__}: choose another name")
    KINDS[name] = kind
    return kind
