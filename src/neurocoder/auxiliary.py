"""What conditional layers want added to the loss of the model they are in."""

from __future__ import annotations

from difflib import get_close_matches

import torch
from torch import Tensor, nn

from neurocoder.conditional import KINDS
from neurocoder.program.memory import ProgramMemory
from neurocoder.walk import conditional_layers


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
    terms: dict[str, list[Tensor]] = {}
    stores = {getattr(layer, layer.store): None for layer in layers.values() if layer.store is not None}
    for owner in (*layers.values(), *(store for store in stores if hasattr(store, "auxiliary"))):
        for kind, term in owner.auxiliary().items():
            proposed = getattr(owner, "wants", kinds).get(kind, kinds.get(kind, 1.0))
            weight = weights.get(kind, proposed)
            terms.setdefault(kind, []).extend([weight * term] if weight else [])
    for kind, weight in (kinds | weights).items():
        late = [name for name, layer in layers.items() if kind in layer.wants and layer.training]
        if weight and late and kind not in terms and torch.is_grad_enabled():
            raise ValueError(f"no {kind} loss: no forward in training mode since the last time: {', '.join(late)}")
    return _total([term for of_kind in terms.values() for term in of_kind])


def _total(terms: list[Tensor]) -> Tensor:
    """The sum, on the device of the first."""
    return torch.stack([term.to(terms[0].device) for term in terms]).sum() if terms else torch.zeros(())
