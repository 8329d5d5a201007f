"""Freezing a program: the plain layer that holds what was composed for an input."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from neurocoder.functional import squared_norms
from neurocoder.program.conv import Conv2d
from neurocoder.program.layer import ProgramLayer


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
    (core_NPP, banks), residual_N = layer.coordinates(composition), composition.residual_N
    if not len(core_NPP):
        raise ValueError("freeze needs at least one input, got an empty batch")
    mean_OI = layer.dense(core_NPP.mean(0), None if residual_N is None else residual_N.mean(), banks).t()
    plain = _plain_twin(layer)
    plain.weight.copy_(mean_OI.view_as(plain.weight))
    bias = layer.bias if layer.base is None else layer.base.bias
    if bias is not None:
        plain.bias.copy_(bias)
    if len(core_NPP) > 1:
        spread = _spread(layer, core_NPP, banks, residual_N) / mean_OI.norm()
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


def _spread(layer: ProgramLayer, core_NPP: Tensor, banks: tuple[Tensor, Tensor], residual_N: Tensor | None) -> Tensor:
    """Root mean square Frobenius distance of programs from their mean, in the coordinates of the memories."""
    left, right = (bank.to(core_NPP.dtype) for bank in banks)
    away_NPP = (core_NPP - core_NPP.mean(0)) * layer.gain
    squared_N = squared_norms(away_NPP, left, right)
    if residual_N is not None:
        residual_OI, shift_N = layer.residual.flatten(1).to(away_NPP.dtype), residual_N - residual_N.mean()
        cross_N = (away_NPP * (left @ residual_OI.t() @ right.t())).sum((1, 2))
        squared_N = squared_N + 2 * shift_N * cross_N + shift_N.square() * residual_OI.square().sum()
    return squared_N.clamp_min(0).mean().sqrt()
