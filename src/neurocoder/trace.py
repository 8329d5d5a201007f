"""What a conditional layer did with each input: `with nc.trace(model) as seen: model(x)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neurocoder.conditional import Conditional


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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode while the context is open; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def call(model: nn.Module, batch: Any) -> Any:
    """The model on a batch: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


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
