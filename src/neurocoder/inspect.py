"""Looking at programs: what is to be added to the loss, and freezing a program into a plain layer."""

from __future__ import annotations

import warnings
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from neurocoder.conditional import KINDS
from neurocoder.layers import Conv2d
from neurocoder.memory import ProgramMemory
from neurocoder.program import ProgramLayer
from neurocoder.trace import conditional_layers


def orthogonality(model: nn.Module) -> Tensor:
    """The orthogonal loss (Eq. 5), summed over every program memory in the model; a shared one counts once.

    Zero for a model without memories, so that one training loop serves both.
    """
    memories = [module for module in model.modules() if isinstance(module, ProgramMemory)]
    return _total([memory.auxiliary()["orthogonality"] for memory in memories])


def auxiliary(model: nn.Module, **weights: float) -> Tensor:
    """One scalar of everything that the conditional layers of a model want added to its loss.

        loss = task_loss + nc.auxiliary(model)                      # each kind with the weight its layers propose
        loss = task_loss + nc.auxiliary(model, orthogonality=0.01)  # this kind with another; 0 leaves it out

    Kinds are `orthogonality` (of program memories; a shared one counts once; 0.1), `balance` (of mixtures of experts;
    0.1) and those of classes of your own (`Conditional.wants`). Zero for a model that wants nothing, so that one
    training loop serves all. Losses of a forward are taken: run the model in training mode, then ask, once a step.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"auxiliary takes an nn.Module, got {type(model).__name__}")
    layers = dict(conditional_layers(model))
    kinds: dict[str, float] = {}
    for kind in (*KINDS.values(), *map(type, layers.values())):
        kinds |= kind.wants
    for name, weight in weights.items():
        if name not in kinds:
            near = get_close_matches(name, kinds, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(kinds)}"
            raise TypeError(f"no layer wants a loss of the kind {name!r}; {hint}")
        if not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise ValueError(f"the weight of {name} must be a number of at least 0, got {weight!r}")
    found: dict[str, list[Tensor]] = {}
    stores = {getattr(layer, layer.store): None for layer in layers.values() if layer.store is not None}
    for owner in (*layers.values(), *(store for store in stores if hasattr(store, "auxiliary"))):
        for kind, term in owner.auxiliary().items():
            proposed = getattr(owner, "wants", kinds).get(kind, kinds.get(kind, 1.0))
            weight = weights.get(kind, proposed)
            found.setdefault(kind, []).extend([weight * term] if weight else [])
    for kind, weight in (kinds | weights).items():
        late = [name for name, layer in layers.items() if kind in layer.wants and layer.training]
        if weight and late and kind not in found and torch.is_grad_enabled():
            raise ValueError(f"no {kind} loss: no forward in training mode since the last time: {', '.join(late)}")
    return _total([term for terms in found.values() for term in terms])


def _total(terms: list[Tensor]) -> Tensor:
    """The sum, on the device of the first."""
    return torch.stack([term.to(terms[0].device) for term in terms]).sum() if terms else torch.zeros(())


@torch.no_grad()
def freeze(layer: ProgramLayer, x: Tensor, control: Tensor | None = None) -> nn.Linear | nn.Conv2d:
    """A plain `nn.Linear` or `nn.Conv2d` that holds the program composed for x.

    x is one input or a batch. For a batch it is the mean program, and a warning says how far the members are from it;
    no program but the mean is ever formed.
    """
    if not isinstance(layer, ProgramLayer):
        kind = f"{type(layer).__module__.split('.')[0]} {type(layer).__name__}"
        raise TypeError(f"freeze takes an nc.Linear or nc.Conv2d, got a {kind}: name the layer, e.g. model.fc")
    if getattr(layer, "before", None) is not None:
        raise TypeError("this layer does more than a convolution, see its `before`: no plain layer can hold it")
    composition = layer.composition(x, control)
    core_NPP, residual_N = composition.core(), composition.residual_N
    if not len(core_NPP):
        raise ValueError("freeze needs at least one input, got an empty batch")
    memory = layer.memory
    left, right = memory.left.to(core_NPP.dtype), memory.right.to(core_NPP.dtype)
    mean_OI = (left.t() @ core_NPP.mean(0) @ right).t() * layer.gain
    if residual_N is not None:
        mean_OI = mean_OI + residual_N.mean() * layer.residual.flatten(1)
    plain = _plain_twin(layer)
    if layer.base is not None:
        mean_OI = mean_OI + layer.base.weight.flatten(1)
    plain.weight.copy_(mean_OI.view_as(plain.weight))
    bias = layer.bias if layer.base is None else layer.base.bias
    if bias is not None:
        plain.bias.copy_(bias)
    if len(core_NPP) > 1:
        spread = _spread(layer, core_NPP, residual_N, left, right) / mean_OI.norm()
        warnings.warn(
            f"freeze: the mean of {len(core_NPP)} programs; the members lie {spread:.1%} of its norm away from it",
            stacklevel=3,
        )
    return plain


def _plain_twin(layer: ProgramLayer) -> nn.Linear | nn.Conv2d:
    bias = (layer.bias if layer.base is None else layer.base.bias) is not None
    factory = {"device": layer.gain.device, "dtype": layer.gain.dtype}
    if isinstance(layer, Conv2d):
        plain = nn.Conv2d(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.groups,
            bias,
            layer.padding_mode,
            **factory,
        )
    else:
        plain = nn.Linear(layer.in_features, layer.out_features, bias, **factory)
    return plain.train(layer.training)


def _spread(layer: ProgramLayer, core_NPP: Tensor, residual_N: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Root mean square Frobenius distance of programs from their mean, in the coordinates of the memories."""
    away = (core_NPP - core_NPP.mean(0)) * layer.gain
    squared_N = ((left @ left.t() @ away) * (away @ (right @ right.t()))).sum((1, 2))
    if residual_N is not None:
        residual_OI, shift_N = layer.residual.flatten(1).to(away.dtype), residual_N - residual_N.mean()
        cross_PP = left @ residual_OI.t() @ right.t()
        squared_N = (
            squared_N + 2 * shift_N * (away * cross_PP).sum((1, 2)) + shift_N.square() * residual_OI.square().sum()
        )
    return squared_N.clamp_min(0).mean().sqrt()
