"""How a layer starts (docs/paper.md, "Initialisation"; benchmarks/initialisation.py measures it).

- Singular vectors start orthonormal (unit rows where slots outnumber columns), singular terms around 1.
- Keys start as well-spread directions, so that slots are told apart and components differ from the first step on.
- A fixed `gain` on the composed program gives a fresh layer the output variance of a fresh `nn.Linear`; with a
  residual program the residual carries that variance and the composed part starts small beside it.
"""

from __future__ import annotations

from math import log, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from neurocoder.controller import LstmController
from neurocoder.memory import BANKS, ProgramMemory

if TYPE_CHECKING:
    from neurocoder.program import ProgramLayer

_UNIT_TERM = log(torch.e - 1)  # softplus of it is 1
_SPREAD = 0.5  # of the singular terms
_RESIDUAL_OPEN = 2.0  # sigmoid(2) = 0.88 of the residual program passes
_COMPOSED_BESIDE_RESIDUAL = 0.1  # its share of a fresh nn.Linear's variance
_RECURRENT_GAIN = 3.0
_PROBES = 256


@torch.no_grad()
def layer(layer: ProgramLayer, memory_too: bool) -> None:
    """Initialise every parameter; leaves a layer on the meta device as it is."""
    if layer.gain.is_meta:
        return
    fan_in = layer.memory.in_features
    for parameter in (layer.bias, layer.residual):
        if parameter is not None:
            nn.init.uniform_(parameter, -1 / sqrt(fan_in), 1 / sqrt(fan_in))
    if layer.integration_weight is not None:
        nn.init.zeros_(layer.integration_weight)
        nn.init.constant_(layer.integration_bias, _RESIDUAL_OPEN)
    authors = layer.rules.initialisation == "xavier"
    if memory_too:
        (_memory_xavier if authors else _memory)(layer.memory)
    _controller(layer.controller, authors)
    nn.init.ones_(layer.gain)
    if authors:
        if layer.residual is not None:
            nn.init.xavier_uniform_(layer.residual)
    else:
        _calibrate(layer)


def _memory(memory: ProgramMemory) -> None:
    memory.left.copy_(_spread(memory.left.shape, memory.left.device))
    memory.right.copy_(_spread(memory.right.shape, memory.right.device))
    memory.values.copy_(_UNIT_TERM + _SPREAD * torch.randn_like(memory.values))
    for bank in BANKS:
        keys = _spread((memory.slots, memory.key_dim), memory.left.device)
        free = getattr(memory, f"{bank}_keys")
        if free is not None:
            free.copy_(keys)
            continue
        weight, bias = getattr(memory, f"{bank}_key_weight"), getattr(memory, f"{bank}_key_bias")
        if bank == "values":  # keys on a line beside the origin: the only spread a scalar can have
            line, beside = _spread((2, memory.key_dim), memory.left.device)
            weight.copy_(line[:, None] / _SPREAD)
            bias.copy_(beside - line * (_UNIT_TERM / _SPREAD))
        else:  # orthonormal rows: the network returns exactly these keys
            weight.copy_(keys.t() @ getattr(memory, bank).to(keys.dtype))
            nn.init.zeros_(bias)
    _gates(memory)
    for columns in (memory.left_columns, memory.right_columns):
        if columns is not None:
            nn.init.zeros_(columns)


def _gates(memory: ProgramMemory) -> None:
    if memory.gate_weight is not None:
        bound = 1 / sqrt(memory.gate_features)
        nn.init.uniform_(memory.gate_weight, -bound, bound)
        nn.init.zeros_(memory.gate_bias)


def _memory_xavier(memory: ProgramMemory) -> None:
    for bank, columns in (
        (memory.left, memory.left_columns),
        (memory.right, memory.right_columns),
        (memory.values[:, None], memory.values_keys),
    ):
        rows = torch.empty(memory.slots, bank.shape[1] + (0 if columns is None else columns.shape[1]))
        nn.init.xavier_uniform_(rows)
        bank.copy_(rows[:, : bank.shape[1]])
        if columns is not None:
            columns.copy_(rows[:, bank.shape[1] :])
    for bank in BANKS:
        weight, bias = getattr(memory, f"{bank}_key_weight"), getattr(memory, f"{bank}_key_bias")
        if weight is not None:
            bound = 1 / sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)
    _gates(memory)


def _controller(controller: nn.Module, authors: bool) -> None:
    if not isinstance(controller, LstmController):
        bound = 1 / sqrt(controller.weight.shape[1])
        if authors:
            nn.init.xavier_uniform_(controller.weight)
            nn.init.normal_(controller.bias, std=0.01)
        else:
            nn.init.uniform_(controller.weight, -bound, bound)
            nn.init.uniform_(controller.bias, -bound, bound)
        return
    units = controller.units
    nn.init.zeros_(controller.bias)
    if controller.recurrent_bias is not None:
        nn.init.zeros_(controller.recurrent_bias)
        nn.init.normal_(controller.state, std=0.05)
    bound = 5 / sqrt(controller.weight.shape[1] + units)
    if authors:
        nn.init.uniform_(controller.weight, -bound, bound)
        nn.init.uniform_(controller.recurrent, -bound, bound)
    else:
        nn.init.normal_(controller.weight, std=1 / sqrt(controller.weight.shape[1]))
        for block in [] if controller.recurrent is None else controller.recurrent.chunk(4):
            block.copy_(_RECURRENT_GAIN * _spread((units, units), block.device))
    if controller.query is not None:
        nn.init.uniform_(controller.query, -1 / sqrt(units), 1 / sqrt(units))


def _spread(shape: tuple[int, ...] | torch.Size, device) -> Tensor:
    """Random unit rows, orthogonal to each other as far as the shape allows."""
    rows = nn.init.orthogonal_(torch.empty(shape, device=device))
    return nn.functional.normalize(rows, dim=-1)


def _calibrate(layer: ProgramLayer) -> None:
    """Set `gain` so that standard normal input gives the variance of a fresh nn.Linear, one third."""
    generator = torch.Generator(layer.gain.device).manual_seed(0)
    control = torch.randn(_PROBES, layer.control_features, generator=generator, device=layer.gain.device)
    core_NPP = layer.compose(control).core()
    left, right = (bank.to(core_NPP.dtype) for bank in (layer.memory.left, layer.memory.right))
    squared_N = ((left @ left.t() @ core_NPP) * (core_NPP @ (right @ right.t()))).sum((1, 2))
    variance = squared_N.mean() / layer.memory.out_features
    wanted = (1.0 if layer.residual is None else _COMPOSED_BESIDE_RESIDUAL) / 3
    layer.gain.copy_((wanted / variance).sqrt())
