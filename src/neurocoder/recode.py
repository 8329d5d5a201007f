"""Layer surgery: put conditional layers into any network, in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod, sqrt
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neurocoder.functional import Rules
from neurocoder.layers import Conv2d, Linear
from neurocoder.program import ProgramLayer
from neurocoder.trace import Conditional, named_modules, unwrap

Where = str | Iterable[str] | Callable[[str, nn.Module], bool]
REPLACEABLE = (nn.Linear, nn.Conv2d)


def recode(
    model: nn.Module,
    where: Where,
    layer: type[Conditional] = Linear,
    *,
    base: Literal["replace", "frozen"] = "replace",
    **options: Any,
) -> list[str]:
    """Replace layers of `model` by conditional ones, in place, and return the names of the replaced layers.

    Everything is checked, and every new layer built, before anything is changed. Make the optimiser afterwards.

    Args:
        where: a glob pattern over module names ("classifier.*"; `*` crosses dots), several of them, or a predicate of
            name and module. `nn.Linear` and `nn.Conv2d` layers can be replaced.
        layer: the class of the new layers; with the default, a convolution becomes an `nc.Conv2d`.
        base: "replace" starts afresh; "frozen" keeps the trained layer, frozen, and adds the composed program to its
            output: the network starts as exactly the one it was.
        options: for the constructor, e.g. slots=30.
    """
    if base not in ("replace", "frozen"):
        raise ValueError(f"base must be 'replace' or 'frozen', got {base!r}")
    if isinstance(model, DistributedDataParallel):
        raise TypeError("recode the model before it is wrapped in DistributedDataParallel, which holds its parameters")
    chosen = _choose(model, where)
    trained = [name for name, old in chosen.items() if base == "replace" and _looks_trained(old)]
    new = {name: build(old, layer, base, options) for name, old in chosen.items()}
    swap(model, {chosen[name]: new[name] for name in chosen})
    if trained:
        warnings.warn(
            f"recode started afresh although these weights seem to have been trained: {', '.join(trained)}; "
            "base='frozen' keeps trained weights",
            stacklevel=2,
        )
    return list(chosen)


def build(old: nn.Module, layer: type[Conditional], base: str, options: dict[str, Any]) -> Conditional:
    """The conditional layer that takes the place of `old`: same shape, device, dtype and mode."""
    options = dict(options)
    if isinstance(old, nn.Conv2d) and layer is Linear:
        layer = Conv2d
    if base == "frozen":
        if not issubclass(layer, ProgramLayer):
            raise TypeError(f"base='frozen' adds a composed program; {layer.__name__} does not compose one")
        rules = options.pop("rules", None) or Rules()
        if options.pop("compat", None):
            rules = Rules.authors(options.get("steps", 1))
        # M_V starts at zero, and keys made from equal slots would be equal for ever.
        options["rules"] = replace(rules, free_keys=tuple({*rules.free_keys, "right"}))
    options |= {"device": old.weight.device, "dtype": old.weight.dtype}
    options["bias"] = old.bias is not None and base == "replace"  # a frozen base keeps its own
    if isinstance(old, nn.Conv2d):
        names = (
            "in_channels",
            "out_channels",
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "groups",
            "padding_mode",
        )
    else:
        names = ("in_features", "out_features")
    new = layer(**{name: getattr(old, name) for name in names}, **options)
    if base == "frozen":
        new.adopt(old)
    if isinstance(new, Conv2d):
        new.before = _before(old)
    return new.train(old.training)


def swap(model: nn.Module, replacements: dict[nn.Module, nn.Module]) -> None:
    """Put each new module wherever the old one stands."""
    owners = [*unwrap(model).modules()]
    for owner in owners:
        for name, child in owner._modules.items():
            if child in replacements and owner is not replacements[child]:
                owner._modules[name] = replacements[child]
                if isinstance(owner, nn.TransformerEncoderLayer):
                    owner.activation_relu_or_gelu = 0  # its fast path reads linear1.weight: turn that path off
    for encoder in owners:
        if isinstance(encoder, nn.TransformerEncoder):  # and so does that of the encoder around it
            encoder.use_nested_tensor &= all(getattr(layer, "activation_relu_or_gelu", 1) for layer in encoder.layers)


def _choose(model: nn.Module, where: Where) -> dict[str, nn.Module]:
    modules = {name: module for name, module in named_modules(model) if name}
    if callable(where):
        chosen = {name: module for name, module in modules.items() if where(name, module)}
        if not chosen:
            raise ValueError("the predicate chose no module")
    else:
        chosen = {}
        for pattern in [where] if isinstance(where, str) else where:
            chosen |= _match(pattern, modules)
    owners = {child: owner for _, owner in named_modules(model) for child in owner.children()}
    uses = _uses(model)
    for name, module in chosen.items():
        _refuse(name, module, owners[module], uses)
    return chosen


def _match(pattern: str, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    found = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
    layers: dict[str, nn.Module] = {n: module for n, module in found.items() if isinstance(module, REPLACEABLE)}
    if layers:
        return layers
    candidates = [name for name, module in modules.items() if isinstance(module, REPLACEABLE)]
    near = get_close_matches(pattern, candidates, n=5, cutoff=0.0)
    hint = f"the nearest that can be replaced: {', '.join(near)}" if near else "the model has no nn.Linear or nn.Conv2d"
    if not found:
        raise ValueError(f"no module matches {pattern!r}; {hint}")
    kinds = sorted({type(module).__name__ for module in found.values()})
    raise ValueError(
        f"{pattern!r} matches only {', '.join(kinds)}, and recode replaces nn.Linear and nn.Conv2d; {hint}"
    )


def _refuse(name: str, module: nn.Module, owner: nn.Module, uses: dict[nn.Parameter, set[str]]) -> None:
    """Raise if this module cannot be replaced without breaking its owner."""
    if not isinstance(module, REPLACEABLE):
        raise TypeError(f"{name} is a {type(module).__name__}; recode replaces nn.Linear and nn.Conv2d")
    if isinstance(owner, nn.MultiheadAttention):
        raise TypeError(
            f"{name} belongs to an nn.MultiheadAttention, which reads its weight instead of calling it: "
            "it would never run. Recode the feed-forward layers, or use an attention that calls its layers"
        )
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        raise TypeError(f"{name} is lazy and has no shape yet: run the model once before recoding it")
    if not _does_as_its_type(module):
        raise TypeError(
            f"{name} is a {type(module).__name__} with a forward of its own that a re-coded layer would not "
            f"repeat: put a plain {'nn.Linear' if isinstance(module, nn.Linear) else 'nn.Conv2d'} there first"
        )
    others = uses[module.weight] - {name}
    if others:
        raise ValueError(f"the weight of {name} is also that of {', '.join(sorted(others))}: untie them first")


def _before(old: nn.Module) -> nn.Module | None:
    """What a layer applies to its input first; None for the plain nn.Linear and nn.Conv2d."""
    plain = type(old).forward in (nn.Linear.forward, nn.Conv2d.forward)
    children = [*old.children()]
    return None if plain or not children else nn.Sequential(*children)


@torch.no_grad()
def _does_as_its_type(old: nn.Module) -> bool:
    """Whether a subclass with a forward of its own computes a plain layer after its children, tried on random input."""
    if type(old).forward in (nn.Linear.forward, nn.Conv2d.forward):
        return True
    if old.weight.is_meta:
        return False
    generator = torch.Generator().manual_seed(0)
    shape = (2, old.in_features) if isinstance(old, nn.Linear) else (2, old.in_channels, 33, 32)
    x = torch.randn(shape, generator=generator).to(old.weight)
    try:
        plain = nn.Linear.forward if isinstance(old, nn.Linear) else nn.Conv2d.forward
        before = _before(old)
        return torch.allclose(plain(old, x if before is None else before(x)), old(x), rtol=1e-4, atol=1e-5)
    except (RuntimeError, TypeError, ValueError):
        return False


def _uses(model: nn.Module) -> dict[nn.Parameter, set[str]]:
    """For each parameter, the modules that hold it."""
    uses: dict[nn.Parameter, set[str]] = {}
    for name, module in named_modules(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                uses.setdefault(parameter, set()).add(name)
    return uses


def _looks_trained(old: nn.Module) -> bool:
    """Whether a weight lies outside the interval that PyTorch's own initialisation draws from."""
    if old.weight.is_meta:
        return False
    fan_in = prod(old.weight.shape[1:])
    return bool(old.weight.detach().abs().max() > 1.001 / sqrt(fan_in))


def rules_from(options: dict[str, Any]) -> dict[str, Any]:
    """Constructor options from their JSON form."""
    rules = options.get("rules")
    if rules is None:
        return options
    return options | {"rules": Rules(**{**rules, "free_keys": tuple(rules["free_keys"])})}
