"""Layers whose parameters' squared gradients, summed over samples, have a closed form, and that form for each.

Where a weight enters as a product with the input, a sample's gradient is an outer product, and the sum of their squares
is one product of squares, (g^2)^T (x^2). Program layers and stored programs have such products, and keys that all
samples share.

Shapes: N samples, I in, O out, P slots or programs, K key, X queries, M the three memories.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

import neurocoder as nc
from neurocoder import functional
from neurocoder.program import gather
from neurocoder.program.controller import LinearController

Sums = dict[Tensor, Tensor]  # by parameter
Rule = Callable[..., Sums]


def rule_of(layer: nn.Module) -> Rule | None:
    """From a layer, the gradient of its output (N, O) and its inputs (N, I), the control included where it has one, to
    the sums of squares."""
    if type(layer) is nc.Linear:
        return _rule_of_programs(layer)
    if type(layer) is nn.Linear and isinstance(layer.weight, nn.Parameter):  # not one made of others, by weight_norm
        return _linear
    return _stored if type(layer) is nc.peers.StoredProgramMemory and not layer.controlled else None


def _rule_of_programs(layer: nc.Linear) -> Rule | None:
    how, extras = layer.addressing, (layer.base, layer.residual, layer.memory.gate_weight)
    if any(extra is not None for extra in extras):
        return None
    if how.fixed and layer.gathers and layer.controller_sees == "input":
        return _gathered
    learned = isinstance(layer.controller, LinearController) and not how.product_keys and not layer.controlled
    return _program if learned else None


def owned(layer: nn.Module) -> list[Tensor]:
    """The parameters that a layer's rule speaks of."""
    if type(layer) is nc.peers.StoredProgramMemory:
        return [layer.key]  # query and programs are Linears of their own
    return [*layer.parameters()]


def _squares(g_NO: Tensor, x_NI: Tensor) -> Tensor:
    """sum_n (g_n x_n^T)^2."""
    return g_NO.square().t() @ x_NI.square()


def _linear(layer: nn.Linear, g_NO: Tensor, x_NI: Tensor) -> Sums:
    sums: Sums = {layer.weight: _squares(g_NO, x_NI)}
    if layer.bias is not None:
        sums[layer.bias] = g_NO.square().sum(0)
    return sums


def _stored(layer: nc.peers.StoredProgramMemory, g_NO: Tensor, x_NI: Tensor) -> Sums:
    """Keys are few, so each sample gets its own."""
    key_NPK = layer.key.detach().expand(len(x_NI), -1, -1).clone().requires_grad_()
    weight_NP = vmap(lambda x_I, key_PK: layer.attend(x_I[None], key_PK)[0])(x_NI, key_NPK)
    said_NPO = torch.stack([program(x_NI) for program in layer.programs], 1).detach()
    (each_NPK,) = torch.autograd.grad(weight_NP, key_NPK, torch.einsum("npo,no->np", said_NPO, g_NO))
    return {layer.key: each_NPK.square().sum(0)}


def _gathered(layer: nc.Linear, g_NO: Tensor, x_NI: Tensor, control_NC: Tensor | None = None) -> Sums:
    """A layer whose addresses are fixed: each sample gets copies of its own of the rows that it reads, of which the
    control, or what stands for it, tells.

    A sample may read a row by several heads, so copies are added up before they are squared.
    """
    memory = layer.memory
    with torch.no_grad():
        weight_MkRN, slots, _ = layer.weigh_slots(layer.looked_at(x_NI, control_NC))
    slot_MkRN = torch.stack([own.slot_kRN for own in slots])
    copies = gather.Slots(torch.arange(slot_MkRN[0].numel(), device=x_NI.device).view_as(slot_MkRN[0]))
    rows_3SN = slot_MkRN.flatten(1, 2).expand(3, -1, -1)
    banks = memory.left, memory.right, memory.column if memory.addressing.sparse else memory.values
    own = [
        bank.detach().view(len(bank), -1)[rows_SN.flatten()].requires_grad_()
        for bank, rows_SN in zip(banks, rows_3SN, strict=True)
    ]
    setting = gather.Gathering(layer.rules.order, sparse=False)
    y_NO, _ = gather.plain(x_NI, weight_MkRN, tuple(own), layer.gain, [copies] * len(slots), setting)
    sample_N, sums = torch.arange(len(x_NI), device=x_NI.device), {}
    for bank, rows_SN, g in zip(banks, rows_3SN, torch.autograd.grad(y_NO, own, g_NO), strict=True):
        read, of_read = (sample_N * len(bank) + rows_SN).unique(return_inverse=True)
        each = g.new_zeros(len(read), g.shape[1]).index_add_(0, of_read.flatten(), g)
        sums[bank] = g.new_zeros(len(bank), g.shape[1]).index_add_(0, read % len(bank), each.square())
    if layer.bias is not None:
        sums[layer.bias] = g_NO.square().sum(0)
    return sums


def _program(layer: nc.Linear, g_NO: Tensor, x_NI: Tensor) -> Sums:
    """A program layer without recurrence: products with the input, and keys that depend on the memories.

    A slot's vector m_p enters twice, as itself and by its key W m_p + b: its gradient is an outer product and a part of
    rank K, a_p x + W^T d_p. Where the controller sees the read, a_p has a part that came through the queries.
    """
    memory, controller, reads = layer.memory, layer.controller, layer.controller_sees == "read"
    read_NP = F.linear(x_NI, memory.left.detach())
    seen_NC = read_NP if reads else x_NI
    leaves = [
        F.linear(seen_NC, controller.weight, controller.bias),
        memory.keys().expand(len(x_NI), -1, -1, -1),
        read_NP,
        memory.values.expand(len(x_NI), -1),
    ]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]

    def compose(query_X: Tensor, key_MPK: Tensor, read_P: Tensor, values_P: Tensor) -> Tensor:
        query_MKRN, _ = controller(query_X[:, None])
        score = functional.score(query_MKRN, functional.sharpen(key_MPK, layer.sharpness))
        if layer.addressing.top_k is not None:
            score = functional.only(score, functional.best(score, layer.addressing.top_k)[1])
        left, right, values = functional.attend(score, None, layer.heads, 0, layer.rules)
        sigma_RN = functional.singular_values(values_P, values, layer.rules.order)
        return functional.transform(read_P[:, None], left, sigma_RN, right)[:, 0]

    part_NP = vmap(compose)(*leaves) * layer.gain
    dq_NX, dk_NMPK, dread_NP, dvalues_NP = torch.autograd.grad(part_NP, leaves, g_NO @ memory.right.detach().t())
    if reads:
        dread_NP = dread_NP + dq_NX @ controller.weight.detach()
    sums: Sums = {
        controller.weight: _squares(dq_NX, seen_NC),
        controller.bias: dq_NX.square().sum(0),
    }
    if layer.bias is not None:
        sums[layer.bias] = g_NO.square().sum(0)
    ones = x_NI.new_ones(len(x_NI), 1)
    banks = {"left": (dread_NP, x_NI), "right": (part_NP.detach(), g_NO), "values": (dvalues_NP, ones)}
    free_keys = {bank: memory.free_keys(bank) for bank in memory.addressing.banks}
    for free, d_NPK in zip(free_keys.values(), dk_NMPK.unbind(1), strict=True):
        if free is not None:
            sums[free] = d_NPK.square().sum(0)
    for at, (bank, (a_NP, b_NI)) in enumerate(banks.items()):
        slots = memory.column if bank == "values" and memory.addressing.sparse else getattr(memory, bank)
        if memory.addressing.one_choice or free_keys[bank] is not None:
            sums[slots] = _squares(a_NP, b_NI)
            continue
        d_NPK = dk_NMPK[:, at]
        weight, bias = getattr(memory, f"{bank}_key_weight"), getattr(memory, f"{bank}_key_bias")
        slots_PI = slots.detach().view(len(slots), -1)
        sums[slots] = _outer_and_keys(a_NP, b_NI, d_NPK, weight.detach())
        gram_KPP = torch.einsum("npk,nqk->kpq", d_NPK, d_NPK)
        sums[weight] = ((gram_KPP @ slots_PI) * slots_PI).sum(1)
        sums[bias] = d_NPK.sum(1).square().sum(0)
    return sums


def _outer_and_keys(a_NP: Tensor, b_NI: Tensor, d_NPK: Tensor, weight_KI: Tensor) -> Tensor:
    """sum_n (a_n b_n^T + d_n W)^2, with no gradient of a single sample ever formed."""
    total_PI = _squares(a_NP, b_NI)
    gram_PKL = torch.einsum("npk,npl->pkl", d_NPK, d_NPK)
    total_PI += torch.einsum("pkl,ki,li->pi", gram_PKL, weight_KI, weight_KI)
    for d_NP, weight_I in zip(d_NPK.unbind(2), weight_KI, strict=True):
        total_PI += 2 * weight_I * ((a_NP * d_NP).t() @ b_NI)
    return total_PI
