"""What every conditional layer is, and what it records of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neurocoder.functional import autocasting

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
    """What one call of a layer did with each of its inputs."""

    def __repr__(self) -> str:
        shapes = (f"{name} {tuple(value.shape)}" for name, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({', '.join(shapes)})"


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


@dataclass(frozen=True, repr=False)
class Mixture(Record):
    """How one call of a mixture of experts or a stored-program memory weighed what it stores.

    Attributes:
        weights: (..., parts), summing to 1; 0 for an expert that was not computed.
        chosen: the experts that were computed, (..., top_k); None where all programs are.
    """

    weights: Tensor
    chosen: Tensor | None


@dataclass(frozen=True, repr=False)
class Choice(Record):
    """What one call of a modular layer chose.

    Attributes:
        probability: of each module, for each choice, (..., choices, modules).
        chosen: the modules it used, (..., choices, 1); several where it mixed them, (..., choices, mixed).
    """

    probability: Tensor
    chosen: Tensor


@dataclass(frozen=True, repr=False)
class Modulation(Record):
    """How one call of a HyperNet scaled its inputs, or of a FiLM scaled and shifted its outputs.

    Attributes:
        scale: (..., features).
        shift: (..., features); None for a HyperNet.
    """

    scale: Tensor
    shift: Tensor | None


class Conditional(nn.Module):
    """A layer whose computation depends on its input: what `trace`, `diagnose`, `recode` and `save` work with.

    Class attributes:
        home: where users find the class.
        replaces: the plain layer it stands for.
        convolution: the class that stands for a convolution where this one stands for a linear layer.
        store: the attribute, and option, that holds what several layers may share.
        size: the option that decides how large a layer is.
    """

    home = "nc"
    replaces: type[nn.Module] = nn.Linear
    convolution: type[Conditional] | None = None
    store: str | None = None
    size: str | None = None

    replaced: int | None = None  # parameters of the plain layer that it replaced
    _calls: list | None = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments, fit for JSON, that build this layer anew beside those of the layer it replaces."""
        raise NotImplementedError

    def _record(self, call: Record) -> None:
        if self._calls is not None:
            self._calls.append(call)

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
        name = f"{self.home}.{type(self).__name__}"
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
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a whole number, at least 1, got {size!r}")
