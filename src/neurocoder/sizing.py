"""How large re-coded layers are: chosen where nobody says, matched where somebody does, shown as a table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from neurocoder.conditional import Conditional
from neurocoder.functional import BANKS, Rules
from neurocoder.walk import named_modules, unwrap

ROOM = 0.149  # by which share a network may grow where nobody says how large its layers are
LARGE = 10_000  # a layer of so many parameters keeps `ENOUGH` slots while there are others to shrink
ENOUGH = 8
SIZES = (
    (16, 8),
    (12, 6),
    (8, 4),
    (8, 2),
    (8, 1),
    (6, 3),
    (4, 2),
    (3, 1),
    (2, 1),
)  # slots and heads; one slot is no choice
MISSED = 0.05  # a network that comes no nearer to the parameters asked for: somebody should know

Options = dict[str, Any]
Build = Callable[[nn.Module, Options], Conditional]  # on the meta device: to be counted


def count(*modules: nn.Module) -> int:
    """Parameters, each counted once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def defaults(size: tuple[int, int], given: Options, frozen: bool) -> Options:
    """The options of a layer of so many slots and heads: small, and able to start as the old layer."""
    slots, heads = size
    own: Options = {"slots": slots, "heads": heads, "key_dim": 5 if slots > 3 else slots, "residual": not frozen}
    if given.get("control_features") is None and not given.get("sparse"):
        own["controller_sees"] = "read"
    if given.get("compat") is None:
        own["rules"] = Rules(free_keys=BANKS)  # a key network of a wide layer is as large as five slots
    return own | given


def choose(model: nn.Module, layers: Mapping[str, nn.Module], given: Options, frozen: bool, build: Build) -> dict:
    """Options for each layer such that the network grows by at most `ROOM`: as many slots as there is room for.

    Where there is too little, that layer shrinks which frees most. Small layers are left out before large ones have
    fewer than `ENOUGH` slots, and what does not fit with two slots is left out, too.
    """
    if given.get("product_keys"):
        raise ValueError("product keys are for a large memory, of n * n slots: give slots=, e.g. slots=4096")
    if given.get("addresses") == "fixed" and not frozen:
        raise ValueError(
            "a layer starts as the old one by a controller that learns to tell inputs apart, and addresses='fixed' "
            "never do: give slots= to start afresh, or base='frozen'"
        )
    if given.get("top_k") == 1 and not frozen:
        raise ValueError(
            "a layer starts as the old one by a controller that learns to tell inputs apart, and where a component "
            "reads one slot it has no gradient: give top_k=2 or more, slots= to start afresh, or base='frozen'"
        )
    room = ROOM * count(unwrap(model))
    least = max(given.get("least_used") or 0, given.get("top_k") or 0)
    steps = {name: _candidates(old, least) for name, old in layers.items()}
    own = {name: count(old) for name, old in layers.items()}
    kept: dict[tuple[str, tuple[int, int]], int] = {}

    def grows(name: str, place: int = 0) -> int:
        key = name, steps[name][place]
        if key not in kept:
            kept[key] = count(build(layers[name], defaults(key[1], given, frozen))) - own[name]
        return kept[key]

    def may_shrink(name: str) -> int:
        """2: gladly; 1: if it must be; 0: not at all."""
        if len(steps[name]) == 1:
            return 0
        return 1 if own[name] >= LARGE and steps[name][1][0] < ENOUGH else 2

    while steps and sum(map(grows, steps)) > room:
        how = max(map(may_shrink, steps))
        able = [name for name in steps if may_shrink(name) == how]
        small = [name for name in steps if own[name] < LARGE]
        if how == 2 or (how == 1 and not small):
            steps[max(able, key=lambda name: grows(name) - grows(name, 1))].pop(0)
        else:
            steps.pop(max(small or able, key=lambda name: grows(name) / own[name]))
    return {name: defaults(places[0], given, frozen) for name, places in steps.items()}


def _candidates(old: nn.Module, least: int) -> list[tuple[int, int]]:
    """Slots and heads that make sense, largest first: no more slots than inputs. Every group of a convolution reads all
    of them at every position, so there a quarter of its outputs: that is the time it adds."""
    most = old.weight[0].numel()
    if isinstance(old, nn.Conv2d):
        enough = ENOUGH if old.groups == 1 and count(old) >= LARGE else 0
        most = min(most, max(enough, old.out_channels // old.groups // 4))
    return [size for size in SIZES if least <= size[0] <= max(most, least, SIZES[-1][0])] or [(least, 1)]


def match(
    model: nn.Module, layers: Mapping[str, nn.Module], kind: type[Conditional], given: Options, wanted: int,
    build: Build,
) -> Options:  # fmt: skip
    """The options with the size of `kind` (slots, experts, ...) for which the network comes nearest to `wanted`."""
    if type(wanted) is not int:
        raise TypeError(f"parameters must be a whole number, got {wanted!r}")
    if kind.size is None:
        raise TypeError(f"{kind.__name__} has no option that decides its size: leave out parameters=")
    if given.get(kind.size) is not None:
        raise TypeError(f"parameters chooses {kind.size}: give one of them")
    if given.get("product_keys"):
        raise ValueError("parameters chooses any number of slots, product keys name n * n: leave out one of them")
    rest = count(unwrap(model)) - count(*layers.values())
    if kind.size == "hidden":
        given = {"layers": 2} | given  # a generator without a hidden layer has one size

    def total(size: int) -> int:
        return rest + sum(count(build(old, given | {kind.size: size})) for old in layers.values())

    least = _smallest(total, max(given.get("top_k") or 1, given.get("least_used") or 1))
    if total(least) > wanted * (1 + MISSED):
        raise ValueError(
            f"no {kind.__name__} is so small: with {kind.size}={least} the network has {total(least):,} parameters, "
            f"not {wanted:,}; plain it has {count(unwrap(model)):,}"
        )
    low, high = least, 2 * least
    while total(high) < wanted:
        if total(high) == total(low):
            raise ValueError(f"{kind.size} does not change the size of these layers: {total(low):,} parameters")
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) < wanted else (low, middle)
    best = min((low, high), key=lambda size: abs(total(size) - wanted))
    nearest = total(best)
    if abs(nearest / wanted - 1) > MISSED:
        warnings.warn(
            f"the nearest to {wanted:,} parameters is {kind.size}={best} with {nearest:,}, {nearest / wanted - 1:+.0%}",
            stacklevel=4,
        )
    return given | {kind.size: best}


def _smallest(total: Callable[[int], int], least: int, more: int = 64) -> int:
    """The smallest size that the other options allow: no fewer experts than are chosen, for one."""
    most = least + more
    for size in range(least, most):
        try:
            total(size)
        except ValueError:
            continue
        return size
    total(most)  # raises what is wrong
    return most


class Size(NamedTuple):
    """One row of `nc.sizes`.

    Attributes:
        name, kind: of the layer.
        parameters: it has, those of what it shares with layers above it left out.
        plain: what the plain layer has, or had, in its place.
    """

    name: str
    kind: str
    parameters: int
    plain: int

    @property
    def ratio(self) -> float:
        return self.parameters / self.plain if self.plain else 1.0


class Sizes(list[Size]):
    """The sizes of a network's layers; prints as a table. `total` is the last line of it."""

    @property
    def total(self) -> Size:
        return Size("total", "", sum(row.parameters for row in self), sum(row.plain for row in self))

    def __str__(self) -> str:
        header = ("name", "kind", "parameters", "plain", "ratio")
        rows = [(r.name, r.kind, f"{r.parameters:,}", f"{r.plain:,}", f"{r.ratio:.2f}") for r in (*self, self.total)]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        line = "{:<{}}  {:<{}}  {:>{}}  {:>{}}  {:>{}}"
        return "\n".join(
            line.format(*(part for pair in zip(row, widths, strict=True) for part in pair)) for row in (header, *rows)
        )


def sizes(model: nn.Module) -> Sizes:
    """What each layer of `model` holds, and what the plain layer in its place does or did: `print(nc.sizes(model))`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"sizes takes an nn.Module, got {type(model).__name__}")
    seen, rows, inside = set(), Sizes(), set()
    for name, module in named_modules(model):
        if module in inside:
            continue
        conditional = isinstance(module, Conditional)
        own = {*(module.parameters() if conditional else module.parameters(recurse=False))}
        if conditional:
            inside.update(module.modules())
        new = sum(p.numel() for p in own - seen)
        kind = module.name() if conditional else type(module).__name__
        if own:
            rows.append(Size(name, kind, new, module.plain_size() if conditional else new))
        seen |= own
    return rows
