"""How every conditional layer of a model used what it stores, on a batch. Entropies are in nats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import singledispatch
from math import log
from typing import Any

import torch
from torch import Tensor, nn

from neurocoder.conditional import Conditional
from neurocoder.functional import similarity
from neurocoder.program.layer import ProgramLayer
from neurocoder.records import Attention, Choice, Mixture, Modulation, Record, combined, shares
from neurocoder.trace import trace
from neurocoder.walk import call, conditional_layers, evaluating, unknown_layer

DEAD = 0.1  # a part with less than this share of an even share of the use counts as dead
_JOINT = 2**16  # compositions of modules that are counted one by one
_NAMED = 6  # dead parts that a table names
_COLUMNS = ("layer", "class", "kind", "bank", "inputs", "parts", "entropy", "of batch", "at most", "most used", "dead")


@dataclass(frozen=True)
class Diagnosis:
    """What a diagnosis tells of every layer. Its parts are slots, experts, programs, modules, features or components;
    some layers have several banks of them.

    Attributes:
        kind: the class of the layer.
        inputs: programs composed, rows routed, or rows modulated, in all calls of the layer.
        usage: (parts,), mean share of each part in one input's use; (banks, parts) where there are banks.
        entropy: mean entropy of one input's use: low if it uses few parts; (banks,) where there are banks.
        entropy_batch: entropy of the mean use: low if all inputs use the same parts; (banks,) where there are banks.
        entropy_limit: what both are at most: the logarithm of the number of parts.
        dead: indices of the parts with less than a tenth of an even share; where there are banks, by the bank's name.
    """

    kind: str
    inputs: int
    usage: Tensor
    entropy: Tensor | float
    entropy_batch: Tensor | float
    entropy_limit: float
    dead: list[int] | dict[str, list[int]]

    @property
    def entropy_input(self) -> Tensor | float:
        """The same as `entropy`."""
        return self.entropy

    def __str__(self) -> str:
        lines = [f"{self.inputs} inputs"]
        for field in fields(self)[2:]:
            told = _told(field.name, getattr(self, field.name), [*self.by_bank()])
            lines += [f"{field.name}: {told}"] if told else []
        return "\n  ".join(lines)

    def by_bank(self) -> dict[str, tuple[Tensor, float, float, list[int]]]:
        """Usage, entropy, entropy over the batch and dead parts of each bank; of the only one, with an empty name."""
        if not isinstance(self.dead, dict):
            return {"": (self.usage, float(self.entropy), float(self.entropy_batch), self.dead)}
        numbers = (torch.as_tensor(value).tolist() for value in (self.entropy, self.entropy_batch))
        return dict(zip(self.dead, zip(self.usage, *numbers, self.dead.values(), strict=True), strict=True))


def _told(name: str, value: Any, banks: list[str]) -> str:
    """A field in words; nothing where it is a table of its own."""
    if name == "dead":
        counts = [len(dead) for dead in (value.values() if isinstance(value, dict) else [value])]
    elif isinstance(value, Tensor):
        if value.dim() != 1:
            return ""
        if banks == [""]:
            return " ".join(f"{v:.2f}" for v in value.tolist())
        counts = value.tolist()
    else:
        counts = [value]
    return ", ".join(
        f"{bank} {v:.3g}".strip() for bank, v in zip(banks if len(counts) > 1 else [""], counts, strict=True)
    )


class Report(dict[str, Diagnosis]):
    """The diagnoses of a model's layers by their names; it prints as one table.

    Attributes:
        by: with `by=labels`, a report of the inputs of each class.
    """

    def __init__(self, diagnoses: dict[str, Diagnosis], by: dict[Any, Report] | None = None):
        super().__init__(diagnoses)
        self.by = by or {}

    def __missing__(self, name: str) -> Diagnosis:
        raise unknown_layer(name, self)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        for name in self:
            for label, report in ({"all" if self.by else "": self} | self.by).items():
                rows += [(name, str(label), *cells) for cells in _cells(report[name])]
        kept = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows)]
        table = [[row[i] for i in kept] for row in (_COLUMNS, *rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def _cells(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """The lines of one layer in a table, all but its name and class."""
    lines = []
    for bank, (usage, entropy, entropy_batch, dead) in diagnosis.by_bank().items():
        most = " ".join(f"{i} ({usage[i]:.2f})" for i in usage.argsort(descending=True)[:3].tolist())
        named = " ".join(map(str, dead[:_NAMED])) + (" ..." if len(dead) > _NAMED else "")
        numbers = (f"{entropy:.2f}", f"{entropy_batch:.2f}", f"{diagnosis.entropy_limit:.2f}")
        told = f"{len(dead)}: {named}" if len(dead) else "0"
        lines.append((diagnosis.kind, bank, str(diagnosis.inputs), str(len(usage)), *numbers, most, told))
    return lines


@dataclass(frozen=True)
class ProgramDiagnosis(Diagnosis):
    """How a program-memory layer used its memory; entropies are of attention normalised to 1. The banks are left, right
    and values: usage (3, slots) is the mean attention to each slot, entropy (3,) that of one component's attention.

    Attributes:
        load: (3, slots), share of the components that attend to the slot most.
        read: (3, slots), share of the inputs that read the slot at all; less than 1 only with `top_k`.
        imbalance: (3,), coefficient of variation of the usage over slots: 0 is an even use.
        similarity: mean cosine of the left vectors of one program's components; near 1 is program collapse.
        effective_rank: exp of the entropy of a composed program's normalised singular values, averaged.
    """

    load: Tensor
    read: Tensor
    imbalance: Tensor
    similarity: float
    effective_rank: float


@dataclass(frozen=True)
class RoutingDiagnosis(Diagnosis):
    """How a layer used its experts, stored programs or modules. Usage is the mean weight of each, of modules the mean
    probability; the entropies of modules are the paper's H_a and H_b, of the joint choice; dead goes by the load.

    Attributes:
        load: (parts,), share of what was computed that each computed. Stored programs are all computed: there it is
            the share of inputs that weigh the program most.
        imbalance: coefficient of variation of the usage; 0 is even.
        load_imbalance: that of the load.
    """

    load: Tensor
    imbalance: float
    load_imbalance: float

    @property
    def importance(self) -> Tensor:
        """The same as `usage`."""
        return self.usage


@dataclass(frozen=True)
class ModulationDiagnosis(Diagnosis):
    """How a HyperNet or FiLM modulated its features: usage is the share of each in the sum of the scales' sizes.

    Attributes:
        dead: features whose scale is below a tenth for every input.
        scale: mean scale.
        adaptation: standard deviation of a feature's scale over the inputs, averaged over features; 0: none.
        shift_adaptation: as `adaptation`, of the shifts; 0 for a HyperNet, which has none.
    """

    scale: float
    adaptation: float
    shift_adaptation: float


@torch.no_grad()
def diagnose(model: nn.Module, batch: Any, by: Tensor | Sequence | None = None) -> Report:
    """Run the model on a batch in evaluation mode and say how each conditional layer used what it stores.

    Args:
        batch: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
        by: a label for each input, (B,), or for each of its time steps, (B, T), numbers or a list of words:
            `report.by[label]` then is a report of the inputs of that class.
    """
    layers = dict(conditional_layers(model))
    if not layers:
        raise ValueError("the model has no conditional layer to diagnose; nc.recode puts one in")
    with evaluating(model), trace(model) as seen:
        call(model, batch)
    calls = {name: seen.calls(name) for name in layers if seen.calls(name)}

    def report(choose: Callable[[Record], Record]) -> Report:
        joined = {name: combined([choose(c).rows() for c in own], torch.cat) for name, own in calls.items()}
        for name, record in joined.items():
            if not all(value.isfinite().all() for value in vars(record).values() if value is not None):
                raise ValueError(f"what {name!r} did is not finite: NaN in its inputs or its parameters")
        return Report({name: _diagnose(record, layers[name]) for name, record in joined.items()})

    whole = report(lambda record: record)
    if by is None:
        return whole
    words = sorted({*by}) if not isinstance(by, Tensor) and all(isinstance(label, str) for label in by) else []
    labels = torch.as_tensor([words.index(label) for label in by] if words else by)
    for name, own in calls.items():
        for record in own:
            _check_labels(labels, name, record)
    masks = {words[label] if words else label: labels == label for label in labels.unique().tolist()}
    return Report(whole, {label: report(lambda record, mask=mask: record.where(mask)) for label, mask in masks.items()})


def _check_labels(labels: Tensor, name: str, record: Record) -> None:
    shapes = [tuple(value.shape) for value in vars(record).values() if value is not None]
    if not labels.dim() or any(shape[: labels.dim()] != tuple(labels.shape) for shape in shapes):
        raise ValueError(
            f"by must have one label for each input of every layer; it has the shape {tuple(labels.shape)}, and what "
            f"{name!r} did {shapes[0]}"
        )


@singledispatch
def _diagnose(record: Record, layer: Conditional) -> Diagnosis:
    """What a record of rows says of any layer; the kinds of record that say more follow."""
    return Diagnosis(**_common(record, layer))


def _common(record: Record, layer: Conditional) -> dict[str, Any]:
    use = record.use()
    banks = use if isinstance(use, dict) else {"": use}
    share = shares(torch.stack([*banks.values()]))  # (banks, inputs, parts)
    if not share.shape[1]:
        raise ValueError("diagnose needs at least one input, got an empty batch")
    usage = share.mean(1)
    dead = {bank: _below(row, DEAD / len(row)) for bank, row in zip(banks, usage, strict=True)}
    entropy, entropy_batch = _entropy(share).mean(1), _entropy(usage)
    common = {"kind": layer.name(), "inputs": share.shape[1], "entropy_limit": log(share.shape[2])}
    if isinstance(use, dict):
        return common | {"usage": usage, "entropy": entropy, "entropy_batch": entropy_batch, "dead": dead}
    numbers = {"entropy": entropy.item(), "entropy_batch": entropy_batch.item()}
    return common | {"usage": usage[0], "dead": dead[""]} | numbers


@_diagnose.register
def _programs(record: Attention, layer: ProgramLayer) -> ProgramDiagnosis:
    attention = torch.stack((record.left, record.right, record.values))  # (3, inputs, components, slots)
    share, common = shares(attention), _common(record, layer)
    left = record.left
    return ProgramDiagnosis(
        **common | {"entropy": _entropy(share).mean((1, 2))},
        load=nn.functional.one_hot(share.argmax(-1), share.shape[-1]).to(share.dtype).mean((1, 2)),
        read=(attention > 0).any(2).to(share.dtype).mean(1),
        imbalance=_variation(common["usage"]),
        similarity=similarity(left @ layer.memory.left.to(left.dtype)).item(),
        effective_rank=_effective_rank(layer, left, record.sigma, record.right),
    )


@_diagnose.register
def _mixture(record: Mixture, layer: Conditional) -> RoutingDiagnosis:
    common = _common(record, layer)
    if record.chosen is None:  # all parts are computed: none is dead that weighs something
        return replace(_routing(common, record.weights.argmax(-1)), dead=common["dead"])
    return _routing(common, record.chosen)


@_diagnose.register
def _choices(record: Choice, layer: Conditional) -> RoutingDiagnosis:
    common, (h_a, h_b) = _common(record, layer), selection_entropy(record.probability)
    limit = record.probability.shape[1] * common["entropy_limit"]
    return _routing(common | {"entropy": h_a, "entropy_batch": h_b, "entropy_limit": limit}, record.chosen)


def _routing(common: dict[str, Any], used: Tensor) -> RoutingDiagnosis:
    usage = common["usage"]
    count = torch.bincount(used.flatten(), minlength=len(usage)).to(usage.dtype)
    load = count / count.sum()
    return RoutingDiagnosis(
        **common | {"dead": _below(load, DEAD / len(load))},
        load=load,
        imbalance=_variation(usage).item(),
        load_imbalance=_variation(load).item(),
    )


@_diagnose.register
def _modulation(record: Modulation, layer: Conditional) -> ModulationDiagnosis:
    scale, shift = record.scale, record.shift
    return ModulationDiagnosis(
        **_common(record, layer) | {"dead": _below(scale.abs().amax(0), DEAD)},
        scale=scale.mean().item(),
        adaptation=scale.std(0, correction=0).mean().item(),
        shift_adaptation=0.0 if shift is None else shift.std(0, correction=0).mean().item(),
    )


def _below(amount: Tensor, bar: float) -> list[int]:
    return (amount < bar).nonzero().flatten().tolist()


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
    return 0.0 - torch.xlogy(share, share).sum(-1)  # a minus sign would make -0 of nothing


def _variation(amount: Tensor) -> Tensor:
    return amount.std(-1, correction=0) / amount.mean(-1)


def _effective_rank(layer: ProgramLayer, left_NRP: Tensor, sigma_NR: Tensor, right_NRP: Tensor) -> float:
    banks = zip((left_NRP, right_NRP), (layer.memory.left, layer.memory.right), strict=True)
    vectors = (attention @ bank.to(attention.dtype) for attention, bank in banks)
    left_NXR, right_NXR = (torch.linalg.qr(v.transpose(1, 2)).R for v in vectors)
    values = torch.linalg.svdvals((left_NXR * sigma_NR[:, None]) @ right_NXR.transpose(1, 2))
    return _entropy(values / values.sum(-1, keepdim=True).clamp_min(1e-30)).exp().mean().item()
