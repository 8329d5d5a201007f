"""What later tasks change in a Neurocoder: how far each part of it moved, and what putting a part back is worth.

A layer answers by its queries (the controller), its keys, and the programs that they choose from (the banks, with a
residual program and bias where there are any). Keys are made from slots, so they are held by themselves: `put_back`
can restore slots and keep today's keys, or the other way round.

Shapes: see `neurocoder.functional`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc

PARTS = ("queries", "keys", "programs")
SUBSETS = tuple(subset for size in range(len(PARTS) + 1) for subset in combinations(PARTS, size))
MEASURES = ("queries", "keys", "attention", "programs", "outputs")
State = dict[str, Tensor]


def addresses(name: str) -> bool:
    """Whether a parameter decides what is read: the controller's, the keys', the gates'."""
    return ".controller." in name or "_key" in name or "gate_" in name


def layers(model: nn.Module) -> dict[str, nc.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nc.Linear)}


@contextmanager
def as_it_was(model: nn.Module, then: State, parts: tuple[str, ...]) -> Iterator[None]:
    """Inside, these parts of every program layer are as they were then.

    What is in no program layer (the layers of a plain network) goes back with the programs.
    """
    now = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inside = layers(model)
    keys_now = {name: layer.memory.keys().detach() for name, layer in inside.items()}
    model.load_state_dict(then)
    keys_then = {name: layer.memory.keys().detach() for name, layer in inside.items()}
    chosen = {name: "queries" if ".controller." in name else "programs" for name in now}
    model.load_state_dict({name: (then if chosen[name] in parts else now)[name] for name in now})
    for name, layer in inside.items():
        layer.memory.keys = _always((keys_then if "keys" in parts else keys_now)[name])
    try:
        yield
    finally:
        for layer in inside.values():
            del layer.memory.keys
        model.load_state_dict(now)


def _always(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


@torch.no_grad()
def put_back(model: nn.Module, then: State, accuracy: Callable[[], float]) -> dict[str, float]:
    """The accuracy with every choice of parts as they were then, by their names joined; "" is the model as it is."""
    worth = {}
    for subset in SUBSETS:
        with as_it_was(model, then, subset):
            worth["+".join(subset)] = accuracy()
    return worth


@torch.no_grad()
def moved(model: nn.Module, then: State, forward: Callable[[], object]) -> dict[str, dict[str, float]]:
    """How far each part of each layer that the forward calls has moved since then, seen from that layer's old inputs.

    Queries and keys: 1 - cosine; attention: half the L1 distance; programs and outputs: distance over length.
    """
    inside = layers(model)
    inputs: dict[nn.Module, Tensor] = {}
    with as_it_was(model, then, PARTS):
        hooks = [
            layer.register_forward_pre_hook(lambda layer, given: inputs.__setitem__(layer, given[0]))
            for layer in inside.values()
        ]
        forward()
        for hook in hooks:
            hook.remove()
        called = {name: inputs[layer] for name, layer in inside.items() if layer in inputs}
        before = {name: _answers(inside[name], x) for name, x in called.items()}
    after = {name: _answers(inside[name], x) for name, x in called.items()}
    return {name: {what: _distance(what, old[what], after[name][what]) for what in old} for name, old in before.items()}


def _answers(layer: nc.Linear, x: Tensor) -> dict[str, Tensor]:
    """Queries (M, K, R, N), keys (M, P, K), attention (3, N, R, P), programs (N, I, O) and outputs of a layer."""
    with nc.trace(layer) as seen:
        outputs = layer(x)
    call = seen[""]
    control = F.linear(x, layer.memory.left) if layer.controller_sees == "read" else x
    attention = torch.stack((call.left, call.right, call.values))
    return {
        "queries": layer.controller(F.linear(control, layer.controller.weight, layer.controller.bias).t())[0],
        "keys": layer.memory.keys(),
        "attention": attention / attention.sum(-1, keepdim=True),
        "programs": layer.program(x),
        "outputs": outputs,
    }


def _distance(what: str, old: Tensor, new: Tensor) -> float:
    if what in ("queries", "keys"):
        return 1 - F.cosine_similarity(old, new, dim=1 if what == "queries" else -1).mean().item()
    if what == "attention":
        return (old - new).abs().sum(-1).mean().item() / 2
    axes = tuple(range(1, old.dim()))
    return ((old - new).norm(dim=axes) / old.norm(dim=axes).clamp_min(1e-12)).mean().item()
