"""Walking through models: their modules under the names the user gave, and calling them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neurocoder.conditional import Conditional


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


def unknown_layer(name: object, known: Iterable[str]) -> KeyError:
    """The error for a name that no conditional layer has."""
    near = get_close_matches(str(name), [*known], n=3, cutoff=0.0) or ["none"]
    return KeyError(f"no conditional layer is called {name!r}; the nearest names: {', '.join(near)}")
