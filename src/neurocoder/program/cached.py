"""Keeping what does not depend on the input: `with nc.cached(model), torch.no_grad(): model(x)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from neurocoder.program.layer import ProgramLayer


class Kept:
    """What a layer made from its parameters alone, and how to see that one of them changed."""

    def __init__(self, layer: ProgramLayer):
        self.layer = layer
        self.made: dict[str, Any] = {}
        self.stamp: list[int] = []
        self.seen: list[Tensor] = []
        if any(tensor.is_inference() for tensor in self._tensors()):
            raise ValueError(
                "this model was made under torch.inference_mode, where nobody can see whether a parameter changes: "
                "make it, or load it, outside"
            )

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives: the same as before, unless a parameter changed or somebody takes derivatives."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or watched():
            return make()
        tensors, stamp = self._tensors(), []
        for tensor in tensors:
            stamp += (tensor.data_ptr(), tensor._version)
        if stamp != self.stamp:
            # An alias keeps the memory of what was seen: no other tensor can come to lie at the same address.
            self.made, self.stamp, self.seen = {}, stamp, [tensor.detach() for tensor in tensors]
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def _tensors(self) -> list[Tensor]:
        layer = self.layer
        parts = (layer._parameters, layer._buffers, layer.memory._parameters, layer.controller._parameters)
        return [tensor for held in parts for tensor in held.values() if tensor is not None]

    def forget(self) -> None:
        self.made = {}

    def __reduce__(self) -> tuple:
        """A copy of a layer keeps nothing, nor does one that is stored."""
        return type(None), ()


def watched() -> bool:
    """Whether `torch.func` maps or differentiates what is called now, or forward-mode derivatives are taken."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@contextmanager
def cached(model: nn.Module) -> Iterator[None]:
    """Let every program-memory layer of `model` keep what does not depend on the input, such as the keys of its slots.

    For inference: it acts where gradients are off (`torch.no_grad`, `torch.inference_mode`). Elsewhere, and under
    `torch.compile` and `torch.func`, layers compute as they always do. Results are those without it: a parameter that
    was written to, moved or replaced is noticed at the next call, and what came of it made anew; so is a step of any
    optimiser of `torch.optim`. What PyTorch itself does not count cannot be noticed, such as a write through `.data`
    (`p.data.copy_(...)`), through NumPy, or by another process: leave the block first.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"cached takes an nn.Module, got {type(model).__name__}")
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_kept")]
    outer = [layer._kept for layer in layers]
    kept = [Kept(layer) for layer in layers]
    for layer, own in zip(layers, kept, strict=True):
        layer._kept = own
    # fused optimisers write to parameters without raising their versions
    stepped = register_optimizer_step_post_hook(lambda *_: [own.forget() for own in kept] and None)
    try:
        yield
    finally:
        stepped.remove()
        for layer, before in zip(layers, outer, strict=True):
            layer._kept = before
