"""Putting one layer in another's place: what can be replaced, by what, and how to undo it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from neurocoder.conditional import SHAPES, Conditional
from neurocoder.program.conv import Conv2d
from neurocoder.program.layer import ProgramLayer
from neurocoder.program.options import resolve
from neurocoder.sizing import count
from neurocoder.walk import named_modules, unwrap

REPLACEABLE = (nn.Linear, nn.Conv2d)


def build(
    old: nn.Module, layer: type[Conditional], base: str, options: dict[str, Any], device: Any = None
) -> Conditional:
    """The conditional layer that takes the place of `old`: same shape, device (if none is given), dtype and mode."""
    options = dict(options)
    if isinstance(old, nn.Conv2d) and layer.convolution is not None:
        layer = layer.convolution
    if not isinstance(old, layer.replaces):
        raise TypeError(f"an nn.{type(old).__name__} cannot become an {layer.name()}")
    if base == "frozen" and issubclass(layer, ProgramLayer):
        options = _frozen_options(options)
    options |= {"device": device or old.weight.device, "dtype": old.weight.dtype}
    options["bias"] = old.bias is not None and base == "replace"  # a frozen base keeps its own
    new = layer(**{name: getattr(old, name) for name in SHAPES[layer.replaces]}, **options)
    new.replaced = count(old)
    if base == "frozen":
        new.adopt(old)
    before = _before(old)
    if isinstance(new, Conv2d):
        new.before = before
    elif before is not None:
        raise TypeError(f"this convolution does more than one, see its forward; {layer.name()} would not")
    return new.train(old.training)


def _frozen_options(options: dict[str, Any]) -> dict[str, Any]:
    """M_V starts at zero, and keys made from equal slots would be equal for ever: let them be free."""
    chosen = resolve(options)
    if chosen["memory"] is not None and chosen["memory"].right.any():
        raise ValueError("base='frozen' starts with right vectors of zero; the given memory has others")
    rules = chosen["rules"]
    return chosen | {"rules": replace(rules, free_keys=(*rules.free_keys, "right"))}


def freeze_bases(layers: Iterable[nn.Module]) -> None:
    """The last step of surgery: what is kept of the old layers is not trained."""
    for layer in layers:
        if getattr(layer, "base", None) is not None:
            layer.base.requires_grad_(False)


def swap(model: nn.Module, replacements: dict[nn.Module, Conditional]) -> Callable[[], None]:
    """Put each new module wherever the old one stands; returns how to undo it."""
    owners, undo = [*unwrap(model).modules()], []
    for owner in owners:
        for name, child in owner._modules.items():
            if child in replacements:
                undo.append((owner._modules, name, child))
                owner._modules[name] = replacements[child]
                if isinstance(owner, nn.TransformerEncoderLayer):  # its fast path reads linear1.weight: turn it off
                    undo.append((owner.__dict__, "activation_relu_or_gelu", owner.activation_relu_or_gelu))
                    owner.activation_relu_or_gelu = 0
    for encoder in owners:
        if isinstance(encoder, nn.TransformerEncoder):  # and so does that of the encoder around it
            undo.append((encoder.__dict__, "use_nested_tensor", encoder.use_nested_tensor))
            encoder.use_nested_tensor &= all(getattr(layer, "activation_relu_or_gelu", 1) for layer in encoder.layers)

    def put_back() -> None:
        for place, name, value in reversed(undo):
            place[name] = value

    return put_back


def refusal(model: nn.Module) -> Callable[[str, nn.Module], None]:
    """A function that raises if a module cannot be replaced without breaking its owner."""
    owners = {unwrap(child): owner for _, owner in named_modules(model) for child in owner.children()}
    wrapped = {unwrap(child) for module in model.modules() for child in module.children() if unwrap(child) is not child}
    uses = _uses(model)

    def refuse(name: str, module: nn.Module) -> None:
        if not isinstance(module, REPLACEABLE):
            raise TypeError(f"{name} is a {type(module).__name__}; recode replaces nn.Linear and nn.Conv2d")
        if isinstance(owners[module], nn.MultiheadAttention):
            raise TypeError(
                f"{name} belongs to an nn.MultiheadAttention, which reads its weight instead of calling it: it would "
                "never run. Name the layers to replace so that it is left out, e.g. '*linear?'"
            )
        if module in wrapped:
            raise TypeError(f"{name} is compiled by itself: recode first, compile afterwards")
        if isinstance(module.weight, nn.parameter.UninitializedParameter):
            raise TypeError(f"{name} is lazy and has no shape yet: run the model once before recoding it")
        if module._parameters.get("weight") is None:
            raise TypeError(f"the weight of {name} is parametrised or pruned: make that permanent first")
        if module._forward_hooks or module._forward_pre_hooks:
            raise TypeError(f"{name} has forward hooks, which a new layer would not have: remove them first")
        if not _does_as_its_type(module):
            raise TypeError(
                f"{name} is a {type(module).__name__} with a forward of its own, which a re-coded layer would not do: "
                f"put a plain {'nn.Linear' if isinstance(module, nn.Linear) else 'nn.Conv2d'} there first"
            )
        others = uses[module.weight] - {name}
        if others:
            raise ValueError(f"the weight of {name} is also that of {', '.join(sorted(others))}: untie them first")

    return refuse


def _before(old: nn.Module) -> nn.Module | None:
    """What a convolution with a forward of its own applies first, such as padding; None for others."""
    children = [*old.children()]
    own = isinstance(old, nn.Conv2d) and type(old).forward is not nn.Conv2d.forward
    return nn.Sequential(*children) if own and children else None


@torch.no_grad()
def _does_as_its_type(old: nn.Module) -> bool:
    """Whether a subclass with a forward of its own computes a plain layer after its children, tried on random input."""
    if type(old).forward in (nn.Linear.forward, nn.Conv2d.forward):
        return True
    if old.weight.is_meta or any(child.state_dict() for child in old.children()):
        return False
    shape = (2, old.in_features) if isinstance(old, nn.Linear) else (2, old.in_channels, 33, 32)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(old.weight)
    plain = nn.Linear.forward if isinstance(old, nn.Linear) else nn.Conv2d.forward
    try:
        with torch.random.fork_rng(devices=[]):
            for mode in (True, False):
                twin = copy.deepcopy(old).train(mode)
                before = _before(twin)
                wanted = plain(twin, x if before is None else before(x))
                if not torch.allclose(wanted, twin(x), rtol=1e-4, atol=1e-5):
                    return False
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def _uses(model: nn.Module) -> dict[nn.Parameter, set[str]]:
    """For each parameter, the modules that hold it."""
    uses: dict[nn.Parameter, set[str]] = {}
    for name, module in named_modules(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                uses.setdefault(parameter, set()).add(name)
    return uses
