"""Layer surgery: put conditional layers into any network, in place."""

from __future__ import annotations

import copy
import inspect
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

from neurocoder import sizing
from neurocoder.conditional import SHAPES, Conditional
from neurocoder.functional import Rules
from neurocoder.program.conv import Conv2d
from neurocoder.program.layer import ProgramLayer
from neurocoder.program.linear import Linear
from neurocoder.program.options import resolve
from neurocoder.walk import named_modules, unwrap

Where = str | Iterable[str] | Callable[[str, nn.Module], bool]
REPLACEABLE = (nn.Linear, nn.Conv2d)


def recode(
    model: nn.Module,
    where: Where,
    layer: type[Conditional] = Linear,
    *,
    base: Literal["replace", "frozen"] = "replace",
    parameters: int | None = None,
    **options: Any,
) -> list[str]:
    """Replace layers of `model` by conditional ones, in place, and return the names of the replaced layers.

    `nc.recode(model, "*")` with no other word is a good start: where `slots` is not given, they are chosen for each
    layer, and heads, controller and residual program with them, so that the network grows by at most 15% and starts
    as what it was, trained or fresh. `nc.sizes(model)` shows what became of the size of each layer.

    Everything is checked, and every new layer built, before anything is changed. Make the optimiser afterwards: one
    made before trains the old parameters.

    Args:
        where: a glob pattern over module names ("classifier.*"; `*` crosses dots), several of them, or a predicate of
            name and module. `nn.Linear` and `nn.Conv2d` layers can be replaced. A pattern with a wildcard leaves out
            what cannot be replaced, with a warning that says why; a name is an error.
        layer: the class of the new layers: `nc.Linear`, one of `nc.peers`, `nc.modular.Linear` or an `nc.Conditional`
            of your own. With `nc.Linear` and `nc.modular.Linear`, a convolution becomes the `Conv2d` beside it.
        base: "replace" starts afresh where `slots` is given, whatever the old layer had learned; "frozen" keeps the
            trained layer, frozen, and adds the composed program to its output, or modulates it (FiLM, HyperLinear), or
            adds a product of low rank (LowRank): the network starts as exactly the one it was.
        parameters: how many the network is to have. Chooses, for all layers alike, the option that decides the size of
            `layer` (slots, experts, programs, hidden, modules, rank), so that the network comes as near as it can.
        options: for the constructor, e.g. slots=30. Bias, device and dtype are those of the layer replaced.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"recode takes an nn.Module first, got {type(model).__name__}")
    if base not in ("replace", "frozen"):
        raise ValueError(f"base must be 'replace' or 'frozen', got {base!r}")
    if isinstance(model, DistributedDataParallel):
        raise TypeError("recode the model before it is wrapped in DistributedDataParallel, which holds its parameters")
    _check_options(layer, options)
    chosen, left_out = _choose(model, where)
    said = (options.get("slots"), options.get("memory"), parameters)
    unsaid = issubclass(layer, ProgramLayer) and all(word is None for word in said)
    each = _options(model, chosen, layer, base, unsaid, parameters, options)
    left_out |= {name: "too small to hold programs in a network of this size" for name in chosen if name not in each}
    new = {chosen[name]: build(chosen[name], layer, base, own) for name, own in each.items()}
    trained = []
    for name in each if base == "replace" else ():
        old, made = chosen[name], new[chosen[name]]
        if unsaid and isinstance(made, ProgramLayer) and made.residual is not None:
            if not old.weight.isfinite().all():
                raise ValueError(f"the weights of {name} are not finite: nothing can start as them")
            made.become(old)
        elif _looks_trained(old):
            trained.append(name)
    swap(model, new)
    freeze_bases(new.values())
    if left_out:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        warnings.warn(f"recode left these layers as they were: {reasons}", stacklevel=2)
    if trained:
        warnings.warn(
            f"recode started afresh although these weights seem to have been trained: {', '.join(trained)}; "
            "base='frozen' keeps trained weights, and so does a recode without slots=",
            stacklevel=2,
        )
    return list(each)


def _options(
    model: nn.Module, chosen: dict[str, nn.Module], layer: type[Conditional], base: str, unsaid: bool,
    parameters: int | None, options: dict[str, Any],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """The options of each layer, with its size chosen where it is not given."""

    def meta(old: nn.Module, own: dict[str, Any]) -> Conditional:
        return build(old, layer, base, own, device="meta")

    if unsaid:
        if options.get("residual", True) or base == "frozen":
            found = sizing.choose(model, chosen, options, base == "frozen", meta)
            if not found:
                raise ValueError(
                    f"the network is too small to choose slots by itself: with {sizing.count(unwrap(model)):,} "
                    f"parameters it would grow by more than {sizing.ROOM:.0%}. Give slots=, e.g. slots=4"
                )
            return found
        parameters = sizing.count(unwrap(model))
    if parameters is not None:
        options = sizing.match(model, chosen, layer, options, parameters, meta)
    return dict.fromkeys(chosen, options)


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
    new.replaced = sizing.count(old)
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


def _check_options(layer: type[Conditional], options: dict[str, Any]) -> None:
    if not (isinstance(layer, type) and issubclass(layer, Conditional)):
        raise TypeError(f"layer must be a conditional layer such as nc.Linear, got {layer!r}")
    fixed = {"bias", "device", "dtype"} & options.keys()
    if fixed:
        raise TypeError(f"recode takes {', '.join(sorted(fixed))} from the layer it replaces: leave it out")
    known = [*inspect.signature(layer).parameters]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1) or [", ".join(known)]
            raise TypeError(f"{layer.__name__} has no option {name!r}; did you mean {near[0]}?")


def _choose(model: nn.Module, where: Where) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The modules to replace, by the first name of each; and why others that a wildcard matches are left out."""
    if isinstance(unwrap(model), REPLACEABLE):
        raise ValueError(
            "the model is itself the layer: build an nc.Linear or nc.Conv2d, or put it into an nn.Sequential"
        )
    modules, recoded = _outside_conditional_layers(model)
    first = {module: name for name, module in reversed(modules.items())}
    named = {*modules}
    if callable(where):
        chosen = {name: module for name, module in modules.items() if where(name, module)}
    elif isinstance(where, str | Iterable):
        patterns = [where] if isinstance(where, str) else [*where]
        named = {name for name in modules if name in patterns}
        chosen = {name: module for pattern in patterns for name, module in _match(pattern, modules, recoded).items()}
    else:
        raise TypeError(f"where is a pattern such as '2', several of them, or a predicate; got {where!r}")
    if not chosen:
        raise ValueError("nothing was chosen: " + ("the predicate is never true" if callable(where) else "no pattern"))
    chosen = {first[module]: module for module in chosen.values()}
    named = {first[modules[name]] for name in named}
    refuse, left_out = refusal(model), {}
    for name, module in chosen.items():
        try:
            refuse(name, module)
        except (TypeError, ValueError) as error:
            if name in named or len(left_out) == len(chosen) - 1:
                raise
            left_out[name] = str(error)
    return {name: module for name, module in chosen.items() if name not in left_out}, left_out


def _outside_conditional_layers(model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
    """All modules by all their names, but for layers that are re-coded already and what is inside; and their names."""
    model, found, recoded = unwrap(model), {}, []
    inside = {part for module in model.modules() if isinstance(module, Conditional) for part in module.modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        name = name.replace("_orig_mod.", "")
        if name and module not in inside:
            found[name] = unwrap(module)
        elif isinstance(module, Conditional):
            recoded.append(name)
    return found, recoded


def _match(pattern: str, modules: dict[str, nn.Module], recoded: list[str]) -> dict[str, nn.Module]:
    found = {name: module for name, module in modules.items() if fnmatchcase(name, str(pattern))}
    layers: dict[str, nn.Module] = {n: module for n, module in found.items() if isinstance(module, REPLACEABLE)}
    if layers:
        return layers
    candidates = [name for name, module in modules.items() if isinstance(module, REPLACEABLE)]
    near = get_close_matches(str(pattern), candidates, n=5, cutoff=0.0)
    hint = f"the nearest that can be replaced: {', '.join(near)}" if near else "there is none left to replace"
    again = [name for name in recoded if fnmatchcase(name, str(pattern))]
    if again:
        raise ValueError(f"{pattern!r} matches only what is re-coded already ({', '.join(again[:5])}); {hint}")
    if not found:
        raise ValueError(f"no module matches {pattern!r}; {hint}")
    kinds = sorted({type(module).__name__ for module in found.values()})
    raise ValueError(f"{pattern!r} matches only {', '.join(kinds)}; recode replaces nn.Linear and nn.Conv2d; {hint}")


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


def _looks_trained(old: nn.Module) -> bool:
    """Whether a weight lies outside the interval that PyTorch's own initialisation draws from."""
    if old.weight.is_meta:
        return False
    fan_in = prod(old.weight.shape[1:])
    return bool(old.weight.detach().abs().max() > 1.001 / sqrt(fan_in))


def rules_from(options: dict[str, Any]) -> dict[str, Any]:
    """Constructor options from their JSON form."""
    rules = options.get("rules")
    return options if rules is None else options | {"rules": Rules(**rules | {"free_keys": tuple(rules["free_keys"])})}
