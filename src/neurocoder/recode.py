"""Re-coding a network: which layers become conditional ones, of what size, and what the user hears of it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod, sqrt
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from neurocoder.conditional import SHAPES, Conditional
from neurocoder.program.layer import ProgramLayer
from neurocoder.program.linear import Linear
from neurocoder.sizing import ROOM, choose, count, match
from neurocoder.surgery import REPLACEABLE, build, freeze_bases, refusal, swap
from neurocoder.walk import unwrap

Where = str | Iterable[str] | Callable[[str, nn.Module], bool]


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
            if not old.weight.is_meta and not old.weight.isfinite().all():
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
            own_options = choose(model, chosen, options, base == "frozen", meta)
            if not own_options:
                raise ValueError(
                    f"the network is too small to choose slots by itself: with {count(unwrap(model)):,} "
                    f"parameters it would grow by more than {ROOM:.0%}. Give slots=, e.g. slots=4"
                )
            return own_options
        parameters = count(unwrap(model))
    if parameters is not None:
        options = match(model, chosen, layer, options, parameters, meta)
    return dict.fromkeys(chosen, options)


def _check_options(layer: type[Conditional], options: dict[str, Any]) -> None:
    if not (isinstance(layer, type) and issubclass(layer, Conditional)):
        raise TypeError(f"layer must be a conditional layer such as nc.Linear, got {layer!r}")
    fixed = {"bias", "device", "dtype"} & options.keys()
    if fixed:
        raise TypeError(f"recode takes {', '.join(sorted(fixed))} from the layer it replaces: leave it out")
    known = [*inspect.signature(layer).parameters]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            own = [option for option in known if option not in (*SHAPES[layer.replaces], "bias", "device", "dtype")]
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(own)}"
            raise TypeError(f"{layer.__name__} has no option {name!r}; {hint}")


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
    model, modules, recoded = unwrap(model), {}, []
    inside = {part for module in model.modules() if isinstance(module, Conditional) for part in module.modules()}
    for name, module in model.named_modules(remove_duplicate=False):
        name = name.replace("_orig_mod.", "")
        if name and module not in inside:
            modules[name] = unwrap(module)
        elif isinstance(module, Conditional):
            recoded.append(name)
    return modules, recoded


def _match(pattern: str, modules: dict[str, nn.Module], recoded: list[str]) -> dict[str, nn.Module]:
    matched = {name: module for name, module in modules.items() if fnmatchcase(name, str(pattern))}
    layers: dict[str, nn.Module] = {n: module for n, module in matched.items() if isinstance(module, REPLACEABLE)}
    if layers:
        return layers
    candidates = [name for name, module in modules.items() if isinstance(module, REPLACEABLE)]
    near = get_close_matches(str(pattern), candidates, n=5, cutoff=0.0)
    hint = f"the nearest that can be replaced: {', '.join(near)}" if near else "there is none left to replace"
    again = [name for name in recoded if fnmatchcase(name, str(pattern))]
    if again:
        raise ValueError(f"{pattern!r} matches only what is re-coded already ({', '.join(again[:5])}); {hint}")
    if not matched:
        raise ValueError(f"no module matches {pattern!r}; {hint}")
    kinds = sorted({type(module).__name__ for module in matched.values()})
    raise ValueError(f"{pattern!r} matches only {', '.join(kinds)}; recode replaces nn.Linear and nn.Conv2d; {hint}")


def _looks_trained(old: nn.Module) -> bool:
    """Whether a weight lies outside the interval that PyTorch's own initialisation draws from."""
    if old.weight.is_meta:
        return False
    fan_in = prod(old.weight.shape[1:])
    return bool(old.weight.detach().abs().max() > 1.001 / sqrt(fan_in))
