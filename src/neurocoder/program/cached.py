"""Keeping what does not depend on the input: `with nc.cached(model), torch.no_grad(): model(x)`, and in training for
the time steps of one forward: `with nc.cached(model, unrolled=True): model(x)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from neurocoder.program.composer import Composer
from neurocoder.program.kept import Kept


@contextmanager
def cached(model: nn.Module, *, unrolled: bool = False) -> Iterator[None]:
    """Let every program-memory layer of `model` keep what does not depend on the input, such as the keys of its slots.

    For inference: it acts where gradients are off (`torch.no_grad`, `torch.inference_mode`). Elsewhere, and under
    `torch.compile` and `torch.func`, layers compute as they always do. Results are those without it: a parameter that
    was written to, moved or replaced is noticed at the next call, and what came of it made anew; so is a step of any
    optimiser of `torch.optim`. What PyTorch itself does not count cannot be noticed, such as a write through `.data`
    (`p.data.copy_(...)`), through NumPy, or by another process: leave the block first.

    Args:
        unrolled: act where gradients are on, too, and keep the graph of what is kept. For one forward of a network that
            calls a layer again and again, such as a recurrent one: keys are then made, and differentiated, once and
            not at every time step. A second forward in the same block would share that graph: its backward fails.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"cached takes an nn.Module, got {type(model).__name__}")
    layers = [module for module in model.modules() if isinstance(module, Composer)]
    outer = [layer._kept for layer in layers]
    kept = [Kept(layer, unrolled) for layer in layers]
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
