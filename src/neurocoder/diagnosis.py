"""How every conditional layer of a model used what it stores, on a batch. Entropies are in nats."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from neurocoder import functional
from neurocoder.conditional import Attention, Choice, Conditional, Mixture, Modulation
from neurocoder.program import ProgramLayer
from neurocoder.trace import call, conditional_layers, evaluating, trace

DEAD = 0.1  # a part with less than this share of an even share of the use counts as dead
_JOINT = 2**16  # compositions of modules that are counted one by one


@dataclass(frozen=True)
class Diagnosis:
    """What a diagnosis of any layer tells.

    Attributes:
        inputs: programs composed, rows routed, or rows modulated.
    """

    inputs: int

    def __str__(self) -> str:
        rows = [f"{self.inputs} inputs"]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if isinstance(value, float | int):
                rows.append(f"{field.name}: {value:.3g}")
            elif value.dim() == 1 and len(value) == 3 and isinstance(self, ProgramDiagnosis):
                banks = zip(("left", "right", "values"), value.tolist(), strict=True)
                rows.append(f"{field.name}: " + ", ".join(f"{bank} {v:.3g}" for bank, v in banks))
            elif value.dim() == 1:
                rows.append(f"{field.name}: " + " ".join(f"{v:.2f}" for v in value.tolist()))
        return "\n  ".join(rows)


@dataclass(frozen=True)
class ProgramDiagnosis(Diagnosis):
    """How a program-memory layer used its memory; entropies are of attention normalised to 1.

    Attributes:
        usage: (3, slots), mean attention to each slot of the left, right and value banks: their importance.
        load: (3, slots), share of the components that attend to the slot most.
        entropy_input: (3,), mean entropy of one component's attention: low if it picks few slots.
        entropy_batch: (3,), entropy of the mean attention: low if all inputs pick the same slots.
        dead: (3,), slots with less than a tenth of an even share of the attention.
        imbalance: (3,), coefficient of variation of the usage over slots: 0 is an even use.
        similarity: mean cosine of the left vectors of one program's components; near 1 is program collapse.
        effective_rank: exp of the entropy of a composed program's normalised singular values, averaged.
    """

    usage: Tensor
    load: Tensor
    entropy_input: Tensor
    entropy_batch: Tensor
    dead: Tensor
    imbalance: Tensor
    similarity: float
    effective_rank: float


@dataclass(frozen=True)
class RoutingDiagnosis(Diagnosis):
    """How a layer used its experts, stored programs or modules.

    Attributes:
        importance: (parts,), mean weight of each; for modules their mean probability.
        load: (parts,), share of what was computed that each computed. Stored programs are all computed: there it is
            the share of inputs that weigh the program most.
        entropy_input: mean entropy of one input's weights; for modules the paper's H_a, of the joint choice.
        entropy_batch: entropy of the mean weights; for modules the paper's H_b.
        dead: parts with less than a tenth of an even share of the load.
        imbalance: coefficient of variation of the importance; 0 is even.
        load_imbalance: that of the load.
    """

    importance: Tensor
    load: Tensor
    entropy_input: float
    entropy_batch: float
    dead: int
    imbalance: float
    load_imbalance: float


@dataclass(frozen=True)
class ModulationDiagnosis(Diagnosis):
    """How a HyperNet or FiLM modulated its features.

    Attributes:
        scale: mean scale.
        adaptation: standard deviation of a feature's scale over the inputs, averaged over features; 0: none.
        dead: features whose scale is below a tenth for every input.
        shift_adaptation: as `adaptation`, of the shifts; 0 for a HyperNet, which has none.
    """

    scale: float
    adaptation: float
    dead: int
    shift_adaptation: float


@torch.no_grad()
def diagnose(model: nn.Module, batch: Any) -> dict[str, Diagnosis]:
    """Run the model on a batch in evaluation mode and say how each conditional layer used what it stores.

    A batch is a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
    """
    layers = dict(conditional_layers(model))
    if not layers:
        raise ValueError("the model has no conditional layer to diagnose; nc.recode puts one in")
    with evaluating(model), trace(model) as seen:
        call(model, batch)
    return {name: _diagnose(layer, seen.calls(name)) for name, layer in layers.items() if seen.calls(name)}


def _diagnose(layer: Conditional, calls: list) -> Diagnosis:
    kind = type(calls[0])
    find = {Attention: _programs, Mixture: _mixture, Choice: _choices, Modulation: _modulation}[kind]
    return find(layer, calls)


def _joined(calls: list, name: str, axes: int) -> Tensor:
    """One field of all calls, the leading dimensions flattened into one."""
    values = [getattr(call, name) for call in calls]
    joined = torch.cat([value.reshape(-1, *value.shape[value.dim() - axes :]) for value in values])
    if not len(joined):
        raise ValueError("diagnose needs at least one input, got an empty batch")
    return joined


def _programs(layer: ProgramLayer, calls: list[Attention]) -> ProgramDiagnosis:
    left, right, values = (_joined(calls, bank, 2) for bank in ("left", "right", "values"))
    sigma = _joined(calls, "sigma", 1)
    attention = torch.stack((left, right, values))  # (3, inputs, components, slots)
    share = attention / attention.sum(-1, keepdim=True).clamp_min(1e-12)
    usage = share.mean((1, 2))
    load = nn.functional.one_hot(share.argmax(-1), layer.slots).to(share.dtype).mean((1, 2))
    return ProgramDiagnosis(
        inputs=len(left),
        usage=usage,
        load=load,
        entropy_input=_entropy(share).mean((1, 2)),
        entropy_batch=_entropy(usage),
        dead=(usage < DEAD / layer.slots).sum(-1),
        imbalance=_variation(usage),
        similarity=functional.similarity(left @ layer.memory.left.to(left.dtype)).item(),
        effective_rank=_effective_rank(layer, left, sigma, right),
    )


def _mixture(layer: Conditional, calls: list[Mixture]) -> RoutingDiagnosis:
    weights = _joined(calls, "weights", 1)
    importance = weights.mean(0)
    used = weights.argmax(-1) if calls[0].chosen is None else _joined(calls, "chosen", 1).flatten()
    count = torch.bincount(used, minlength=weights.shape[1]).to(weights.dtype)
    entropy = _entropy(weights).mean().item(), _entropy(importance).item()
    return _routing(len(weights), importance, count, entropy)


def _choices(layer: Conditional, calls: list[Choice]) -> RoutingDiagnosis:
    probability = _joined(calls, "probability", 2)
    chosen = _joined(calls, "chosen", 2)
    count = torch.bincount(chosen.flatten(), minlength=probability.shape[-1]).to(probability.dtype)
    return _routing(len(probability), probability.mean((0, 1)), count, selection_entropy(probability))


def _routing(inputs: int, importance: Tensor, count: Tensor, entropy: tuple[float, float]) -> RoutingDiagnosis:
    load = count / count.sum()
    return RoutingDiagnosis(
        inputs=inputs,
        importance=importance,
        load=load,
        entropy_input=entropy[0],
        entropy_batch=entropy[1],
        dead=int((load < DEAD / len(load)).sum()),
        imbalance=_variation(importance).item(),
        load_imbalance=_variation(load).item(),
    )


def _modulation(layer: Conditional, calls: list[Modulation]) -> ModulationDiagnosis:
    scale = _joined(calls, "scale", 1)
    shifted = calls[0].shift is not None
    return ModulationDiagnosis(
        inputs=len(scale),
        scale=scale.mean().item(),
        adaptation=scale.std(0, correction=0).mean().item(),
        dead=int((scale.abs() < DEAD).all(0).sum()),
        shift_adaptation=_joined(calls, "shift", 1).std(0, correction=0).mean().item() if shifted else 0.0,
    )


def selection_entropy(probability_NKM: Tensor) -> tuple[float, float]:
    """H_a and H_b of one modular layer (Eq. 15, 16): the mean entropy of its choice of K modules, and the entropy of
    its mean distribution over all M^K compositions.

    Where these are more than 65,536, the second is the sum over the K choices of the entropy of each: no smaller.
    """
    count, choices, modules = probability_NKM.shape
    p = probability_NKM.double()
    selection = _entropy(p).sum(1).mean().item()
    if modules**choices > _JOINT:
        return selection, _entropy(p.mean(0)).sum().item()
    total = p.new_zeros(modules**choices)
    for rows in p.split(max(1, 2**22 // modules**choices)):
        joint = rows[:, 0]
        for choice in rows.unbind(1)[1:]:
            joint = (joint[:, :, None] * choice[:, None]).flatten(1)
        total += joint.sum(0)
    return selection, _entropy(total / count).item()


def _entropy(share: Tensor) -> Tensor:
    return -torch.xlogy(share, share).sum(-1)


def _variation(amount: Tensor) -> Tensor:
    return amount.std(-1, correction=0) / amount.mean(-1)


def _effective_rank(layer: ProgramLayer, left_NRP: Tensor, sigma_NR: Tensor, right_NRP: Tensor) -> float:
    core_NPP = left_NRP.transpose(1, 2) @ (sigma_NR[..., None] * right_NRP)
    triangles = [torch.linalg.qr(bank.to(core_NPP.dtype).t()).R for bank in (layer.memory.left, layer.memory.right)]
    values = torch.linalg.svdvals(triangles[0] @ core_NPP @ triangles[1].t())
    return _entropy(values / values.sum(-1, keepdim=True).clamp_min(1e-30)).exp().mean().item()
