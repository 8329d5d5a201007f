"""What every conditional layer is."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor, nn

from neurocoder.precision import autocasting
from neurocoder.records import Record

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
