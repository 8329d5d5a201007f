"""What conditional layers did with each input, `with nc.trace(model) as seen: model(x)`, and what they are to look at,
`with nc.controlled(model, control): model(x)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from neurocoder.conditional import Conditional
from neurocoder.records import Record, combined
from neurocoder.walk import conditional_layers, unknown_layer


class Trace(Mapping):
    """Records by layer name. `seen[name]` is a layer's only call; `seen.calls(name)` lists them all, and
    `seen.stacked(name)` is one record of them all."""

    def __init__(self, calls: dict[str, list]):
        self._calls = calls

    def calls(self, name: str) -> list:
        """Every call of the layer, in order."""
        if name not in self._calls:
            raise unknown_layer(name, self._calls)
        return self._calls[name]

    def __getitem__(self, name: str) -> Any:
        calls = self.calls(name)
        if not calls:
            raise ValueError(f"{name!r} was not called: run the model inside of the with block")
        if len(calls) > 1:
            raise ValueError(
                f"{name!r} was called {len(calls)} times: use seen.calls({name!r}) or seen.stacked({name!r})"
            )
        return calls[0]

    def stacked(self, name: str) -> Any:
        """One record of all calls of the layer, such as the steps of a recurrent network: every field (calls, ...)."""
        calls: list[Record] = self.calls(name)
        if not calls:
            raise ValueError(f"{name!r} was not called: run the model inside of the with block")
        if len({repr(call) for call in calls}) > 1:
            raise ValueError(f"the calls of {name!r} differ in shape: {calls[0]} and others; use seen.calls({name!r})")
        return combined(calls, torch.stack)

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
def controlled(model: nn.Module, control: Tensor | Mapping[str, Tensor]) -> Iterator[None]:
    """Let what decides in the conditional layers of `model` look at `control` while the context is open.

        with nc.controlled(model, task):  # or {"body.*": task, "head": state}
            model(x)

    For layers that sit deep in a network, whose owner cannot hand them `control=`. They must have been built with
    `control_features`; a layer that is called with a control of its own looks at that. Where activations are
    checkpointed, and so computed again in the backward, call that inside of the context too.

    Args:
        control: for all such layers of the model, or by name; a name may be a pattern, and the last that fits counts.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"controlled takes an nn.Module first, got {type(model).__name__}")
    layers = {name: layer for name, layer in conditional_layers(model) if layer.controlled}
    chosen: dict[Conditional, Tensor] = {}
    for pattern, tensor in (control if isinstance(control, Mapping) else {"*": control}).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"a control is a tensor, or tensors by the names of layers; got {type(tensor).__name__}")
        matched = [layer for name, layer in layers.items() if fnmatchcase(name, pattern)]
        if not matched:
            near = get_close_matches(pattern, layers, n=3, cutoff=0.0)
            hint = f"the nearest: {', '.join(near)}" if near else "there is none: give recode control_features="
            raise ValueError(f"no layer that was built with control_features matches {pattern!r}; {hint}")
        chosen |= dict.fromkeys(matched, tensor)
    before = {layer: layer._control for layer in chosen}
    _set_controls(chosen)
    try:
        yield
    finally:
        _set_controls(before)


def _set_controls(controls: Mapping[Conditional, Tensor | None]) -> None:
    for layer, control in controls.items():
        object.__setattr__(layer, "_control", control)  # nn.Module would make a parameter its own
