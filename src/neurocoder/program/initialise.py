"""How a layer starts (docs/paper.md, "Initialisation"; benchmarks/initialisation.py measures it).

- Singular vectors start orthonormal (unit rows where slots outnumber columns), singular terms around 1.
- Keys start as well-spread directions, so that slots are told apart.
- The recurrent controller starts forgetful, with open gates and a strong recurrence of its candidate: queries of
  successive steps then differ, and with them the components of a program.
- The slot gates start open: content decides first, usage as far as training finds it useful.
- A convolution's program serves every position of an image, and what follows must make sense of its channels: the
  weights of its controller start small beside the biases, so that all images start with like programs (docs/log.md).
- A fixed `gain` on the composed program gives a fresh layer the output variance of a fresh `nn.Linear`. With a
  residual program, that one carries the variance and the composed part starts small beside it.
"""

from __future__ import annotations

from math import log, sqrt

import torch
from torch import Tensor, nn

from neurocoder.functional import BANKS, similarity
from neurocoder.program.composer import Composer
from neurocoder.program.composition import Composition
from neurocoder.program.controller import LinearController, LstmController
from neurocoder.program.memory import ProgramMemory

_UNIT_TERM = log(torch.e - 1)  # softplus of it is 1
_SPREAD = 0.5  # of the singular terms
_OPEN = 2.0  # sigmoid(2) = 0.88: of the residual program, of content attention, of the controller's own gates
_COMPOSED_BESIDE_RESIDUAL = 0.1  # its share of a fresh nn.Linear's variance
_INPUT_STD = 0.5  # of the recurrent controller's signal from standard normal input
_RECURRENT_GAIN = 8.0  # of the candidate's orthogonal recurrence, for one head; several heads differ by themselves
_SHARED = 0.1  # of the controller's weights, where a program serves every position of an image
_COMPOSED = 0.28  # the squared norm of what is composed at first, over that of an old weight
_PROBES = 256
_MOST = 2**24  # numbers in the attention of all probes to a bank
_MANY = 4096  # more slots than that start as random directions: to make them orthogonal would take long
_ALIKE, _DRAWS = 0.85, 8  # components more alike than that, as few slots may have by chance, are drawn again


@torch.no_grad()
def initialise(layer: Composer, memory_too: bool) -> None:
    """Initialise every parameter; leaves a layer on the meta device as it is."""
    if layer.gain.is_meta:
        return
    fan_in = layer.memory.in_features
    for parameter in (layer.bias, layer.residual):
        if parameter is not None:
            nn.init.uniform_(parameter, -1 / sqrt(fan_in), 1 / sqrt(fan_in))
    if layer.integration_weight is not None:
        nn.init.zeros_(layer.integration_weight)
        nn.init.constant_(layer.integration_bias, _OPEN)
    nn.init.ones_(layer.gain)
    if layer.rules.initialisation == "xavier":
        if memory_too:
            _memory_xavier(layer.memory)
        _controller(layer.controller, authors=True)
        if layer.residual is not None:
            nn.init.xavier_uniform_(layer.residual.flatten(1))
        add_nothing(layer)
        return
    for _ in range(_DRAWS):
        if memory_too:
            _memory(layer.memory)
        _controller(layer.controller, authors=False)
        if layer.spatial:
            layer.controller.weight.mul_(_SHARED)
        if not _alike(_probe(layer), layer.memory):
            break
    _calibrate(layer, _probe(layer))
    add_nothing(layer)


@torch.no_grad()
def add_nothing(layer: Composer) -> None:
    """With a frozen base, a fresh layer's own part is zero: the layer is its base until it is trained."""
    if layer.base is not None:
        nn.init.zeros_(layer.memory.right)
        if layer.residual is not None:
            nn.init.zeros_(layer.residual)


@torch.no_grad()
def start_as(layer: Composer, old: nn.Linear | nn.Conv2d) -> None:
    """Start as `old`, for every input: controller and gates say the same of all inputs, by their biases, and the
    residual program is the old weight less the one program that is composed for all. What was frozen stays so."""
    if layer.gain.is_meta or layer.residual is None:
        return
    memory, controller = layer.memory, layer.controller
    for weight in (controller.weight, memory.gate_weight, layer.integration_weight):
        if weight is not None:
            nn.init.zeros_(weight)
    dtype = torch.promote_types(layer.gain.dtype, torch.float32)
    old_OI = old.weight.flatten(1).to(dtype)
    rank = min(layer.slots, *old_OI.shape)
    left, _, right = torch.svd_lowrank(old_OI.t(), rank)
    memory.left[:rank].copy_(left.t())
    memory.right[:rank].copy_(right.t())
    composition = layer.compose(layer.gain.new_zeros(1, layer.control_features))
    (core_PP,), banks = layer.coordinates(composition)
    composed_OI = layer.composed(core_PP, banks).t().to(dtype)
    norm = old_OI.norm().clamp_min(0.1 * sqrt(len(old_OI) / 3))  # that of a fresh weight, lest one of zeros stay dead
    layer.gain.mul_(sqrt(_COMPOSED) * norm / composed_OI.norm())
    composed_OI = layer.composed(core_PP, banks).t().to(dtype)  # with the gain as it was rounded
    rest_OI = (old_OI - composed_OI) / composition.residual_N.to(dtype)
    layer.residual.copy_(rest_OI.view_as(layer.residual))
    layer.residual.requires_grad_(old.weight.requires_grad)
    if layer.bias is not None:
        layer.bias.copy_(old.bias).requires_grad_(old.bias.requires_grad)


def _probe(layer: Composer) -> Composition:
    """Programs for standard normal control, from a generator of their own: they take nothing from the global one.

    Where the controller sees what the memory reads, the input is standard normal; so is the read of orthonormal rows.
    """
    generator = torch.Generator(layer.gain.device).manual_seed(0)
    reads = layer.controller_sees == "read"
    width = layer.memory.in_features if reads else layer.control_features
    probes = min(_PROBES, max(_MOST // (layer.slots * layer.heads * layer.steps), 2))
    control = torch.randn(probes, width, generator=generator, device=layer.gain.device).to(layer.gain.dtype)
    return layer.compose(nn.functional.linear(control, layer.memory.left) if reads else control)


def _alike(composition: Composition, memory: ProgramMemory) -> bool:
    """Whether a program's components look the same, where there are several."""
    left_NRI = composition.left_PRN.permute(2, 1, 0) @ memory.left.to(composition.left_PRN.dtype)
    return left_NRI.shape[1] > 1 and similarity(left_NRI).item() >= _ALIKE


def _component_norms(composition: Composition, memory: ProgramMemory) -> tuple[Tensor, Tensor]:
    """The squared norms of programs by their components, and what they would be if all slots were orthonormal."""
    attention = composition.left_PRN.permute(2, 1, 0), composition.right_PRN.permute(2, 1, 0)
    sigma_NR = composition.sigma_RN.t()
    products_NRR = sigma_NR[:, :, None] * sigma_NR[:, None]
    apart_NRR = products_NRR
    for weight_NRP, bank in zip(attention, (memory.left, memory.right), strict=True):
        vectors_NRI = weight_NRP @ bank.to(weight_NRP.dtype)
        products_NRR = products_NRR * (vectors_NRI @ vectors_NRI.transpose(1, 2))
        apart_NRR = apart_NRR * (weight_NRP @ weight_NRP.transpose(1, 2))
    return products_NRR.sum((1, 2)), apart_NRR.sum((1, 2))


def _memory(memory: ProgramMemory) -> None:
    memory.left.copy_(_spread(memory.left.shape, memory.left.device))
    memory.right.copy_(_spread(memory.right.shape, memory.right.device))
    memory.values.copy_(_UNIT_TERM + _SPREAD * torch.randn_like(memory.values))
    for bank in memory.addressing.banks:
        free = memory.free_keys(bank)
        if free is not None:
            for half in free if free.dim() == 3 else (free,):
                half.copy_(_spread(half.shape, half.device))
            continue
        keys = _spread((memory.slots, memory.key_dim), memory.left.device)
        weight, bias = getattr(memory, f"{bank}_key_weight"), getattr(memory, f"{bank}_key_bias")
        if bank == "values":  # keys on a line beside the origin: the only spread a scalar can have
            line, beside = _spread((2, memory.key_dim), memory.left.device)
            weight.copy_(line[:, None] / _SPREAD)
            bias.copy_(beside - line * (_UNIT_TERM / _SPREAD))
        else:  # orthonormal rows: the network returns exactly these keys
            weight.copy_(keys.t() @ getattr(memory, bank).to(keys.dtype))
            nn.init.zeros_(bias)
    _gates(memory, _OPEN)
    for columns in (memory.left_columns, memory.right_columns):
        if columns is not None:
            nn.init.zeros_(columns)


def _gates(memory: ProgramMemory, bias: float) -> None:
    if memory.gate_weight is not None:
        bound = 1 / sqrt(memory.gate_features)
        nn.init.uniform_(memory.gate_weight, -bound, bound)
        nn.init.constant_(memory.gate_bias, bias)


def _memory_xavier(memory: ProgramMemory) -> None:
    """A slot's vector, its key columns and its free key as one row of one matrix, as in the authors' code."""
    own = memory.addressing.banks == BANKS and not memory.addressing.product_keys
    for bank in BANKS:
        vectors = memory.column if bank == "values" else getattr(memory, bank)
        parts = [vectors, getattr(memory, f"{bank}_columns", None), memory.free_keys(bank) if own else None]
        parts = [part for part in parts if part is not None]
        rows = nn.init.xavier_uniform_(vectors.new_empty(memory.slots, sum(part.shape[1] for part in parts)))
        for part, columns in zip(parts, rows.split([part.shape[1] for part in parts], 1), strict=True):
            part.copy_(columns)
    for bank in memory.addressing.banks:
        free, weight, bias = (
            memory.free_keys(bank),
            *(getattr(memory, f"{bank}_key_{part}") for part in ("weight", "bias")),
        )
        if free is not None and not own:
            for half in free if free.dim() == 3 else (free,):
                nn.init.xavier_uniform_(half)
        if weight is not None:
            bound = 1 / sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)
    _gates(memory, 0.0)


def _controller(controller: LinearController | LstmController, authors: bool) -> None:
    columns = controller.weight.shape[1]
    if isinstance(controller, LstmController):
        (_lstm_authors if authors else _lstm)(controller, columns)
    elif authors:
        nn.init.xavier_uniform_(controller.weight)
        nn.init.normal_(controller.bias, std=0.01)
    else:
        for parameter in (controller.weight, controller.bias):
            nn.init.uniform_(parameter, -1 / sqrt(columns), 1 / sqrt(columns))


def _lstm(controller: LstmController, columns: int) -> None:
    units = controller.units
    nn.init.normal_(controller.weight, std=_INPUT_STD / sqrt(columns))
    inward, forget, outward, candidate = controller.bias.chunk(4)
    for bias, value in ((inward, _OPEN), (forget, -_OPEN), (outward, _OPEN)):
        nn.init.constant_(bias, value)
    nn.init.normal_(candidate, std=_INPUT_STD)  # queries differ for a zero input as well
    if controller.recurrent is not None:
        nn.init.zeros_(controller.recurrent)
        gain = _RECURRENT_GAIN / sqrt(controller.heads)
        controller.recurrent[3 * units :].copy_(gain * _spread((units, units), controller.weight.device))
    if controller.query is not None:
        nn.init.uniform_(controller.query, -1 / sqrt(units), 1 / sqrt(units))
    if controller.state is not None and controller.recurrent_bias is not None:
        nn.init.normal_(controller.state, std=0.05)
        nn.init.zeros_(controller.recurrent_bias)


def _lstm_authors(controller: LstmController, columns: int) -> None:
    _lstm(controller, columns)
    bound = 5 / sqrt(columns + controller.units)
    nn.init.uniform_(controller.weight, -bound, bound)
    nn.init.zeros_(controller.bias)
    if controller.recurrent is not None:
        nn.init.uniform_(controller.recurrent, -bound, bound)


def _spread(shape: tuple[int, ...] | torch.Size, device) -> Tensor:
    """Random unit rows, orthogonal to each other as far as the shape allows."""
    rows = torch.empty(shape, device=device, dtype=torch.float32)
    rows = nn.init.orthogonal_(rows) if shape[0] <= _MANY else nn.init.normal_(rows)
    return nn.functional.normalize(rows, dim=-1)


def _calibrate(layer: Composer, composition: Composition) -> None:
    """Set `gain`, and the scale of a residual program, to give standard normal input the variance of nn.Linear, 1/3."""
    squared_N, least_N = _component_norms(composition, layer.memory)
    # Where slots outnumber columns, vectors may cancel by chance: that is no reason for a huge gain.
    squared_N = squared_N.clamp_min(0.01 * least_N)
    wanted = layer.memory.out_features / 3
    if layer.residual is not None and composition.residual_N is not None:
        share = (1 - _COMPOSED_BESIDE_RESIDUAL) / composition.residual_N.square().mean()
        layer.residual.mul_(share.sqrt())
        wanted = wanted * _COMPOSED_BESIDE_RESIDUAL
    layer.gain.copy_((wanted / squared_N.mean()).sqrt())
