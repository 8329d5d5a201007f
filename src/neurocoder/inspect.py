"""Looking at programs: the orthogonal loss, freezing a program into a plain layer, and a diagnosis of every layer."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from neurocoder import functional
from neurocoder.layers import Conv2d
from neurocoder.memory import ProgramMemory
from neurocoder.program import ProgramLayer
from neurocoder.trace import Attention, conditional_layers, trace

DEAD = 0.1  # a slot with less than this share of the even share of attention counts as dead


def orthogonality(model: nn.Module) -> Tensor:
    """The orthogonal loss (Eq. 5), summed over every program memory in the model; a shared one counts once.

    Zero for a model without memories, so that one training loop serves both.
    """
    memories = [module for module in model.modules() if isinstance(module, ProgramMemory)]
    if not memories:
        return torch.zeros(())
    with functional.full_precision(memories[0].left):
        terms = [functional.orthogonality_loss(bank) for memory in memories for bank in memory.orthogonal_banks()]
        return torch.stack(terms).sum()


@torch.no_grad()
def freeze(layer: ProgramLayer, x: Tensor, control: Tensor | None = None) -> nn.Linear | nn.Conv2d:
    """A plain `nn.Linear` or `nn.Conv2d` that holds the program composed for x.

    x is one input or a batch. For a batch it is the mean program, and a warning says how far the members are from it;
    no program but the mean is ever formed.
    """
    if not isinstance(layer, ProgramLayer):
        kind = f"{type(layer).__module__.split('.')[0]} {type(layer).__name__}"
        raise TypeError(f"freeze takes an nc.Linear or nc.Conv2d, got a {kind}: name the layer, e.g. model.fc")
    if getattr(layer, "before", None) is not None:
        raise TypeError("this layer does more than a convolution, see its `before`: no plain layer can hold it")
    composition = layer.composition(x, control)
    core_NPP, residual_N = composition.core(), composition.residual_N
    if not len(core_NPP):
        raise ValueError("freeze needs at least one input, got an empty batch")
    memory = layer.memory
    left, right = memory.left.to(core_NPP.dtype), memory.right.to(core_NPP.dtype)
    mean_OI = (left.t() @ core_NPP.mean(0) @ right).t() * layer.gain
    if residual_N is not None:
        mean_OI = mean_OI + residual_N.mean() * layer.residual.flatten(1)
    plain = _plain_twin(layer)
    if layer.base is not None:
        mean_OI = mean_OI + layer.base.weight.flatten(1)
    plain.weight.copy_(mean_OI.view_as(plain.weight))
    bias = layer.bias if layer.base is None else layer.base.bias
    if bias is not None:
        plain.bias.copy_(bias)
    if len(core_NPP) > 1:
        spread = _spread(layer, core_NPP, residual_N, left, right) / mean_OI.norm()
        warnings.warn(
            f"freeze: the mean of {len(core_NPP)} programs; the members lie {spread:.1%} of its norm away from it",
            stacklevel=3,
        )
    return plain


def _plain_twin(layer: ProgramLayer) -> nn.Linear | nn.Conv2d:
    bias = (layer.bias if layer.base is None else layer.base.bias) is not None
    factory = {"device": layer.gain.device, "dtype": layer.gain.dtype}
    if isinstance(layer, Conv2d):
        plain = nn.Conv2d(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            layer.groups,
            bias,
            layer.padding_mode,
            **factory,
        )
    else:
        plain = nn.Linear(layer.in_features, layer.out_features, bias, **factory)
    return plain.train(layer.training)


def _spread(layer: ProgramLayer, core_NPP: Tensor, residual_N: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Root mean square Frobenius distance of programs from their mean, in the coordinates of the memories."""
    away = (core_NPP - core_NPP.mean(0)) * layer.gain
    squared_N = ((left @ left.t() @ away) * (away @ (right @ right.t()))).sum((1, 2))
    if residual_N is not None:
        residual_OI, shift_N = layer.residual.flatten(1).to(away.dtype), residual_N - residual_N.mean()
        cross_PP = left @ residual_OI.t() @ right.t()
        squared_N = (
            squared_N + 2 * shift_N * (away * cross_PP).sum((1, 2)) + shift_N.square() * residual_OI.square().sum()
        )
    return squared_N.clamp_min(0).mean().sqrt()


@dataclass(frozen=True)
class Diagnosis:
    """How a program-memory layer used its memory on a batch. Entropies are in nats, of attention normalised to 1.

    Attributes:
        usage: (3, slots), mean attention to each slot of the left, right and value banks.
        entropy_input: (3,), mean entropy of one component's attention: low if it picks few slots.
        entropy_batch: (3,), entropy of the mean attention: low if all inputs pick the same slots.
        dead: (3,), slots with less than a tenth of an even share of the attention.
        imbalance: (3,), coefficient of variation of the usage over slots: 0 is an even load.
        similarity: mean cosine of the left vectors of one program's components; near 1 is program collapse.
        effective_rank: exp of the entropy of a composed program's normalised singular values, averaged.
        inputs: programs looked at.
    """

    usage: Tensor
    entropy_input: Tensor
    entropy_batch: Tensor
    dead: Tensor
    imbalance: Tensor
    similarity: float
    effective_rank: float
    inputs: int

    def __str__(self) -> str:
        rows = [f"{self.inputs} programs"]
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.dim() == 1:
                rows.append(
                    f"{field.name}: "
                    + ", ".join(
                        f"{bank} {v:.3g}" for bank, v in zip(("left", "right", "values"), value.tolist(), strict=True)
                    )
                )
            elif isinstance(value, float):
                rows.append(f"{field.name}: {value:.3g}")
        return "\n  ".join(rows)


@torch.no_grad()
def diagnose(model: nn.Module, batch: Any) -> dict[str, Diagnosis]:
    """Run the model on a batch in evaluation mode and say how each conditional layer used what it stores.

    A batch is a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
    """
    layers = dict(conditional_layers(model))
    if not layers:
        raise ValueError("the model has no conditional layer to diagnose; nc.recode puts one in")
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with trace(model) as seen:
            if isinstance(batch, dict):
                model(**batch)
            else:
                model(*batch) if isinstance(batch, tuple | list) else model(batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
    return {name: _diagnose(layer, seen.calls(name)) for name, layer in layers.items() if seen.calls(name)}


def _diagnose(layer: ProgramLayer, calls: list[Attention]) -> Diagnosis:
    left, right, values = (
        torch.cat([getattr(call, bank).reshape(-1, *call.left.shape[-2:]) for call in calls])
        for bank in ("left", "right", "values")
    )
    sigma = torch.cat([call.sigma.reshape(-1, call.sigma.shape[-1]) for call in calls])
    if not len(left):
        raise ValueError("diagnose needs at least one input, got an empty batch")
    attention = torch.stack((left, right, values))  # (3, inputs, components, slots)
    share = attention / attention.sum(-1, keepdim=True).clamp_min(1e-12)
    usage = share.mean((1, 2))
    return Diagnosis(
        usage=usage,
        entropy_input=_entropy(share).mean((1, 2)),
        entropy_batch=_entropy(usage),
        dead=(usage < DEAD / layer.slots).sum(-1),
        imbalance=usage.std(-1, correction=0) * layer.slots,
        similarity=functional.similarity(left @ layer.memory.left.to(left.dtype)).item(),
        effective_rank=_effective_rank(layer, left, sigma, right),
        inputs=len(left),
    )


def _entropy(share: Tensor) -> Tensor:
    return -torch.xlogy(share, share).sum(-1)


def _effective_rank(layer: ProgramLayer, left_NRP: Tensor, sigma_NR: Tensor, right_NRP: Tensor) -> float:
    core_NPP = left_NRP.transpose(1, 2) @ (sigma_NR[..., None] * right_NRP)
    triangles = [torch.linalg.qr(bank.to(core_NPP.dtype).t()).R for bank in (layer.memory.left, layer.memory.right)]
    values = torch.linalg.svdvals(triangles[0] @ core_NPP @ triangles[1].t())
    return _entropy(values / values.sum(-1, keepdim=True).clamp_min(1e-30)).exp().mean().item()
