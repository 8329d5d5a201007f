"""The options of a program-memory layer: listed once, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from math import sqrt
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_type_hints

from neurocoder.conditional import check_sizes
from neurocoder.functional import PAPER, Rules
from neurocoder.program.memory import ProgramMemory

Constructor = TypeVar("Constructor", bound=Callable)


class Options(TypedDict, total=False):
    """What the constructors take, each with its default. `Linear` says what they mean."""

    slots: Annotated[int | None, None]
    heads: Annotated[int, 1]
    steps: Annotated[int, 1]
    key_dim: Annotated[int, 5]
    least_used: Annotated[int, 0]
    residual: Annotated[bool, False]
    sharpness: Annotated[float | None, None]
    controller: Annotated[Literal["linear", "lstm"] | int | None, None]
    controller_sees: Annotated[Literal["input", "read"], "input"]
    control_features: Annotated[int | None, None]
    top_k: Annotated[int | None, None]
    one_choice: Annotated[bool, False]
    addresses: Annotated[Literal["learned", "fixed"], "learned"]
    product_keys: Annotated[bool, False]
    sparse: Annotated[bool, False]
    memory: Annotated[ProgramMemory | None, None]
    compat: Annotated[Literal["authors"] | None, None]
    rules: Annotated[Rules | None, None]


_HINTS = get_type_hints(Options, include_extras=True)
OPTIONS: dict[str, Any] = {name: hint.__metadata__[0] for name, hint in _HINTS.items()}  # their defaults


def spelled_out(constructor: Constructor) -> Constructor:
    """Let `inspect.signature` show every option in place of `**options`; device and dtype come last."""
    own = signature(constructor)
    taken = [parameter for parameter in own.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    words = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=OPTIONS[name], annotation=hint.__origin__)
        for name, hint in _HINTS.items()
    ]
    last = [parameter.name for parameter in taken].index("device")
    spelled = own.replace(parameters=[*taken[:last], *words, *taken[last:]])
    constructor.__signature__ = spelled  # pyright: ignore[reportFunctionMemberAccess]
    return constructor


def resolve(given: Mapping[str, Any]) -> dict[str, Any]:
    """All options, with what was left out chosen: slots, sharpness, controller and rules. `compat` became rules."""
    for name in given:
        if name not in OPTIONS:
            near = get_close_matches(name, OPTIONS, n=1) or [", ".join(OPTIONS)]
            raise TypeError(f"a program-memory layer has no option {name!r}; did you mean {near[0]}?")
    chosen = OPTIONS | dict(given)
    memory, steps = chosen["memory"], chosen["steps"]
    if memory is not None and not isinstance(memory, ProgramMemory):
        raise TypeError(f"memory takes an nc.ProgramMemory, got a {type(memory).__name__}")
    if chosen["slots"] is None:
        if memory is None:
            raise TypeError("give slots=, the number of singular programs in memory, e.g. slots=30; or memory=")
        chosen["slots"] = memory.slots
    check_sizes(**{name: chosen[name] for name in ("slots", "heads", "steps", "key_dim")})
    _check_sight(chosen["controller_sees"], chosen["control_features"])
    least_used = chosen["least_used"]
    if type(least_used) is not int or not 0 <= least_used <= chosen["slots"]:
        raise ValueError(f"least_used must be a whole number between 0 and slots={chosen['slots']}, got {least_used!r}")
    if chosen["controller"] is None:
        chosen["controller"] = "lstm" if steps > 1 else "linear"
    return chosen | _resolve_rules(
        **{name: chosen[name] for name in ("compat", "rules", "sharpness", "steps", "key_dim")}
    )


def _check_sight(controller_sees: str, control_features: int | None) -> None:
    if controller_sees not in ("input", "read"):
        raise ValueError(f"controller_sees must be 'input' or 'read', got {controller_sees!r}")
    if controller_sees == "read" and control_features is not None:
        raise ValueError(
            "with controller_sees='read' the controller looks at what the memory reads of x, with "
            f"control_features={control_features!r} at a control: give one of them"
        )
    if control_features is not None:
        check_sizes(control_features=control_features)


def _resolve_rules(
    compat: str | None, rules: Rules | None, sharpness: float | None, steps: int, key_dim: int
) -> dict[str, Any]:
    """What the authors' code does, or the paper, or the given rules. The one place that knows what `compat` means."""
    if rules is not None and not isinstance(rules, Rules):
        raise TypeError(f"rules takes an nc.Rules, got {rules!r}; did you mean compat='authors'?")
    if compat not in (None, "authors"):
        raise ValueError(f"compat must be None or 'authors', got {compat!r}")
    if compat and rules:
        raise ValueError("compat and rules both choose the rules: give one of them")
    if sharpness is None and compat:  # they expand the norms of the keys to K columns, and so divide by K
        sharpness = (10.0 if steps > 1 else 1.0) / key_dim
    elif sharpness is None:  # the cosines of random directions shrink with the root of their length
        sharpness = 3.0 * sqrt(key_dim / 5)
    if not 0 < sharpness < float("inf"):
        raise ValueError(f"sharpness must be a positive number, got {sharpness}")
    return {"compat": None, "rules": Rules.authors(steps) if compat else rules or PAPER, "sharpness": sharpness}


def from_json(options: dict[str, Any]) -> dict[str, Any]:
    """Constructor options from what `Composer.options` gave, read from a file."""
    rules = options.get("rules")
    return options if rules is None else options | {"rules": Rules(**rules | {"free_keys": tuple(rules["free_keys"])})}
