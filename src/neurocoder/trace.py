"""What a conditional layer did with each input: `with nc.trace(model) as seen: model(x)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Attention:
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

    def __repr__(self) -> str:
        shapes = (f"{name} {tuple(value.shape)}" for name, value in vars(self).items() if value is not None)
        return f"Attention({', '.join(shapes)})"


class Conditional(nn.Module):
    """A layer whose computation depends on its input: what `trace`, `diagnose`, `recode` and `save` work with."""

    _calls: list | None = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments, fit for JSON, that build this layer anew beside those of the layer it replaces."""
        raise NotImplementedError

    def _record(self, call: Any) -> None:
        if self._calls is not None:
            self._calls.append(call)


class Trace(Mapping):
    """Records by layer name. `seen[name]` is a layer's only call; `seen.calls(name)` lists them all."""

    def __init__(self, calls: dict[str, list]):
        self._calls = calls

    def calls(self, name: str) -> list:
        """Every call of the layer, in order."""
        if name not in self._calls:
            near = get_close_matches(name, self._calls, n=3, cutoff=0.0) or ["none"]
            raise KeyError(f"no conditional layer is called {name!r}; the nearest names: {', '.join(near)}")
        return self._calls[name]

    def __getitem__(self, name: str) -> Any:
        calls = self.calls(name)
        if not calls:
            raise ValueError(f"{name!r} was not called: run the model inside of the with block")
        if len(calls) > 1:
            raise ValueError(f"{name!r} was called {len(calls)} times: use seen.calls({name!r})")
        return calls[0]

    def __contains__(self, name: object) -> bool:
        return name in self._calls

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __repr__(self) -> str:
        return f"Trace({', '.join(f'{name}: {len(calls)} calls' for name, calls in self._calls.items())})"

    def __len__(self) -> int:
        return len(self._calls)


@contextmanager
def trace(model: nn.Module) -> Iterator[Trace]:
    """Record every call of every conditional layer of `model` while the context is open.

    Recorded tensors are part of the graph: a loss may use them. Detach what you keep.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace takes an nn.Module, got {type(model).__name__}")
    layers = dict(conditional_layers(model))
    outer = {name: layer._calls for name, layer in layers.items()}
    seen = Trace({name: [] for name in layers})
    for name, layer in layers.items():
        layer._calls = seen.calls(name)
    try:
        yield seen
    finally:
        for name, layer in layers.items():
            before = outer[name]
            if before is not None:
                before.extend(seen.calls(name))
            layer._calls = before


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside what `torch.compile` and DDP put around it."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` with the names the user gave, whatever wrapping there is at any depth; each once."""
    seen = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        module = unwrap(module)
        if module in seen:
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    yield from walk("", model)


def conditional_layers(model: nn.Module) -> Iterator[tuple[str, Conditional]]:
    """Every conditional layer of the model under the name the user knows it by."""
    for name, module in named_modules(model):
        if isinstance(module, Conditional):
            yield name, module
