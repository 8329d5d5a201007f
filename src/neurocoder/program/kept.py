"""What a layer keeps while `nc.cached` is open: what it makes from its parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_transformed: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def watched() -> bool:
    """Whether `torch.func` maps or differentiates what is called now, or forward-mode derivatives are taken.

    PyTorch has no public word for either; where it comes to have other private ones, somebody may always be watching.
    """
    return _transformed() or getattr(forward_ad, "_current_level", 0) >= 0


def plainly() -> bool:
    """Whether somebody compiles, maps or differentiates forward: then nothing is written by hand."""
    return torch.compiler.is_compiling() or watched()


class Kept:
    """What a layer with a memory and a controller made from its parameters, and how to see that one of them changed.

    Args:
        graph: keep it with its graph where gradients are on; else nothing is kept there.
    """

    def __init__(self, layer: Any, graph: bool = False):
        self.layer, self.graph = layer, graph
        self.made: dict[tuple[str, bool], Any] = {}
        self.stamp: list[int] = []
        self.seen: list[Tensor] = []
        if any(tensor.is_inference() for tensor in self._tensors()):
            raise ValueError(
                "this model was made under torch.inference_mode, where nobody can see whether a parameter changes: "
                "make it, or load it, outside"
            )

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives: the same as before, unless a parameter changed or somebody takes derivatives."""
        differentiable = torch.is_grad_enabled()
        if (differentiable and not self.graph) or torch.compiler.is_compiling() or watched():
            return make()
        tensors, stamp = self._tensors(), []
        for tensor in tensors:
            stamp += (tensor.data_ptr(), tensor._version)
        if stamp != self.stamp:
            # An alias keeps the memory of what was seen: no other tensor can come to lie at the same address.
            self.made, self.stamp, self.seen = {}, stamp, [tensor.detach() for tensor in tensors]
        if (name, differentiable) not in self.made:
            self.made[name, differentiable] = make()
        return self.made[name, differentiable]

    def _tensors(self) -> list[Tensor]:
        layer = self.layer
        memory, controller = layer.memory, layer.controller
        parts = [part for module in (layer, memory, controller) for part in (module._parameters, module._buffers)]
        parts += [rows._parameters for rows in memory._modules.values()]
        return [tensor for held in parts for tensor in held.values() if tensor is not None]

    def forget(self) -> None:
        self.made = {}

    def __reduce__(self) -> tuple:
        """A copy of a layer keeps nothing, nor does one that is stored."""
        return type(None), ()
