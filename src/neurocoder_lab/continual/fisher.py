"""The diagonal Fisher information of a classifier: gradients of each sample squared, then averaged.

One forward and backward for many samples gives, for every layer called, its inputs and the gradients of its outputs,
row by row. Where a weight enters as a product with the input, a sample's gradient is an outer product, and the sum of
their squares is one product of squares, (g^2)^T (x^2). Program layers and stored programs have such products, and keys
that all samples share; `_program` and `_stored` treat them. Any other parameter is left to `torch.func`.

Shapes: N samples, I in, O out, P slots or programs, K key, X queries, M the three memories.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import neurocoder as nc
from neurocoder import functional
from neurocoder.program.controller import LinearController
from neurocoder.walk import evaluating
from neurocoder_lab.continual.stream import MultiHead

BATCH = 500
FEW = 32  # samples at once where every sample has a gradient of its own
TRIAL = 4  # samples on which a closed form is tried
Sums = dict[Tensor, Tensor]  # by parameter


def fisher(
    model: nn.Module,
    x: Tensor,
    outputs: Callable[[Tensor], Tensor] | None = None,
    y: Tensor | None = None,
    extra: Callable[[], Tensor] | None = None,
) -> dict[str, Tensor]:
    """For each parameter that is trained, the mean over x of the squared gradient of -log p(label | x).

    Args:
        outputs: from inputs to logits, through the model's layers; by default the model itself.
        y: true labels, for the empirical Fisher; by default the label the model finds most likely.
        extra: a loss that does not depend on the data, whose gradient is part of every sample's.
    """
    outputs = model if outputs is None else outputs
    if not len(x) or (y is not None and len(y) != len(x)):
        labels = "" if y is None else f" and {len(y)} labels"
        raise ValueError(f"the Fisher information needs samples and as many labels, got {len(x)} samples{labels}")
    if isinstance(outputs, MultiHead):
        raise ValueError("several heads: give outputs of one task, such as lambda x: stream.logits(model, x, task)")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("the model has no parameter that is trained")
    squares: Sums = {p: torch.zeros_like(p) for p in parameters.values()}
    with evaluating(model), torch.enable_grad():
        layers = _plan(model, outputs, x, squares)
        covered = {p for layer in layers for p in _owned(layer)}
        others, rest = [p for p in squares if p not in covered], set()
        for rows in torch.arange(len(x), device=x.device).split(BATCH):
            rest |= _closed(layers, outputs, x[rows], None if y is None else y[rows], squares, others)
        if not layers and not rest:
            raise ValueError("the outputs do not depend on the model's parameters: are they another model's?")
        if rest:
            _sample_by_sample(model, outputs, x, y, [p for p in others if p in rest], squares)
        if extra is not None:
            _shared(extra, outputs, x, y, squares)
    return {name: (squares[p] / len(x)).clamp_min(0) for name, p in parameters.items()}  # below zero by rounding alone


def _loss(logits: Tensor, y: Tensor | None) -> Tensor:
    if logits.dim() != 2 or not logits.is_floating_point() or not logits.requires_grad:
        told = f"shape {tuple(logits.shape)}, {logits.dtype}{'' if logits.requires_grad else ', without a gradient'}"
        raise ValueError(f"outputs must give logits (samples, classes) through the model's layers, got {told}")
    if not logits.isfinite().all():
        raise ValueError("the outputs are not finite: there is NaN in x, or training diverged")
    return F.cross_entropy(logits, logits.detach().argmax(-1) if y is None else y, reduction="sum")


@contextmanager
def _calls(layers: Iterable[nn.Module]) -> Iterator[list[tuple[nn.Module, tuple, Tensor]]]:
    """Calls of the layers inside the block: each with what it was given and its output."""
    found: list[tuple[nn.Module, tuple, Tensor]] = []

    def note(layer: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        found.append((layer, (*args, *kwargs.values()), output))
        return output.clone()  # what comes next may work in place

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _plan(model: nn.Module, outputs: Callable[[Tensor], Tensor], x: Tensor, squares: Sums) -> list[nn.Module]:
    """The layers whose parameters have a closed form.

    It needs one row a sample, one call of the layer, and parameters that are its alone. What else a model may do with
    a layer's parameters shows in a trial: the closed form must be the sum of a few squared gradients, for the
    least likely labels, where they are large.
    """
    few = x[torch.linspace(0, len(x) - 1, TRIAL).long()]
    with _calls(layer for layer in model.modules() if _rule(layer)) as calls:
        labels = outputs(few).detach().argmin(-1)
    times = Counter(layer for layer, _, _ in calls)
    holders = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    owners = Counter(p for layer in times for p in _owned(layer))
    fit = []
    for layer, given, output in calls:
        alone = all(owners[p] == holders[p] == 1 for p in _owned(layer))
        rows = len(given) == 1 and given[0].shape[:-1] == (TRIAL,)
        if times[layer] == 1 and alone and rows and output.requires_grad and any(p in squares for p in _owned(layer)):
            fit.append(layer)
    wanted = [p for layer in fit for p in _owned(layer) if p in squares]
    if not wanted:
        return []
    trial, known = ({p: torch.zeros_like(p) for p in wanted} for _ in range(2))
    _closed(fit, outputs, few, labels, trial, [])
    for one, label in zip(few.split(1), labels.split(1), strict=True):
        gradients = torch.autograd.grad(_loss(outputs(one), label), wanted, allow_unused=True)
        for p, g in zip(wanted, gradients, strict=True):
            known[p] += 0 if g is None else g.square()

    def agrees(p: Tensor) -> bool:
        return torch.allclose(trial[p], known[p], rtol=0, atol=0.03 * known[p].abs().max().item() + 1e-30)

    return [layer for layer in fit if all(agrees(p) for p in _owned(layer) if p in squares)]


def _closed(
    layers: list[nn.Module],
    outputs: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor | None,
    squares: Sums,
    others: list[Tensor],
) -> set[Tensor]:
    """Add the squared gradients of the layers' parameters; returns those of the other parameters that have one too."""
    with _calls(layers) as calls:
        loss = _loss(outputs(x), y)
    wanted = [output for _, _, output in calls] + others
    found = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
    for (layer, (given,), _), g in zip(calls, found, strict=False):
        if g is not None:
            dtype = _owned(layer)[0].dtype  # not that of an autocast
            for p, squared in _rule(layer)(layer, given.detach().to(dtype), g.to(dtype)).items():
                if p in squares:
                    squares[p] += squared.view_as(p)
    return {p for p, g in zip(others, found[len(calls) :], strict=True) if g is not None}


def _sample_by_sample(
    model: nn.Module,
    outputs: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor | None,
    parameters: list[Tensor],
    squares: Sums,
) -> None:
    """Add the squared gradients of the parameters, one gradient a sample: many at once where `vmap` can."""
    with torch.no_grad():
        labels = torch.cat([outputs(part).argmax(-1) for part in x.split(BATCH)]) if y is None else y
    wrapped = _Wrapped(model, outputs)
    index = {p: i for i, p in enumerate(parameters)}
    # every place that holds one of them, once: a module, or a parameter, may stand in the model twice
    places = [
        (f"{prefix}.{name}", index[p])
        for prefix, module in wrapped.named_modules()
        for name, p in module._parameters.items()
        if p in index
    ]

    def loss(values: list[Tensor], one: Tensor, label: Tensor) -> Tensor:
        held = {name: values[i] for name, i in places}
        return F.cross_entropy(functional_call(wrapped, held, (one[None],), tie_weights=False), label[None])

    each, values = vmap(grad(loss), in_dims=(None, 0, 0)), [p.detach() for p in parameters]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            each(values, x[:1], labels[:1])
        size = FEW
    except RuntimeError:  # recurrent layers, or a choice that depends on the data
        size = 1
    for rows in torch.arange(len(x), device=x.device).split(size):
        if size == FEW:
            gradients = each(values, x[rows], labels[rows])
        else:
            alone = _loss(outputs(x[rows]), labels[rows])
            gradients = [
                torch.zeros_like(p)[None] if g is None else g[None]
                for p, g in zip(parameters, torch.autograd.grad(alone, parameters, allow_unused=True), strict=True)
            ]
        for p, g in zip(parameters, gradients, strict=True):
            squares[p] += g.detach().square().sum(0)


def _shared(
    extra: Callable[[], Tensor],
    outputs: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor | None,
    squares: Sums,
) -> None:
    """Add what a gradient e that all samples share does: sum_n (g_n + e)^2 = sum_n g_n^2 + 2 e sum_n g_n + N e^2."""
    loss = extra()
    if not loss.requires_grad:  # the orthogonal loss of a model without memories
        return
    gradients = torch.autograd.grad(loss, [*squares], allow_unused=True)
    shared = {p: e for p, e in zip(squares, gradients, strict=True) if e is not None}
    for rows in torch.arange(len(x), device=x.device).split(BATCH):
        loss = _loss(outputs(x[rows]), None if y is None else y[rows])
        for (p, e), g in zip(shared.items(), torch.autograd.grad(loss, [*shared], allow_unused=True), strict=True):
            squares[p] += len(rows) * e.square() + (0 if g is None else 2 * e * g)


class _Wrapped(nn.Module):
    """The outputs as a module, so that `functional_call` reaches the model inside."""

    def __init__(self, model: nn.Module, outputs: Callable[[Tensor], Tensor]):
        super().__init__()
        self.model, self.outputs = model, (outputs,)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs[0](x)


Rule = Callable[[Any, Tensor, Tensor], Sums]


def _rule(layer: nn.Module) -> Rule | None:
    """From a layer, its input (N, I) and the gradient of its output (N, O) to the sums of squares."""
    if getattr(layer, "controlled", False):  # what it looks at besides is not among its inputs
        return None
    if type(layer) is nn.Linear and isinstance(layer.weight, nn.Parameter):  # not one made of others, by weight_norm
        return _linear
    if type(layer) is nc.peers.StoredProgramMemory:
        return _stored
    if type(layer) is nc.Linear and isinstance(layer.controller, LinearController):
        extras = (layer.base, layer.residual, layer.memory.gate_weight)
        return _program if all(extra is None for extra in extras) else None
    return None


def _owned(layer: nn.Module) -> list[Tensor]:
    """The parameters that a layer's rule speaks of."""
    if type(layer) is nc.peers.StoredProgramMemory:
        return [layer.key]  # query and programs are Linears of their own
    return [*layer.parameters()]


def _squares(g_NO: Tensor, x_NI: Tensor) -> Tensor:
    """sum_n (g_n x_n^T)^2."""
    return g_NO.square().t() @ x_NI.square()


def _linear(layer: nn.Linear, x_NI: Tensor, g_NO: Tensor) -> Sums:
    found: Sums = {layer.weight: _squares(g_NO, x_NI)}
    if layer.bias is not None:
        found[layer.bias] = g_NO.square().sum(0)
    return found


def _stored(layer: nc.peers.StoredProgramMemory, x_NI: Tensor, g_NO: Tensor) -> Sums:
    """Keys are few, so each sample gets its own."""
    key_NPK = layer.key.detach().expand(len(x_NI), -1, -1).clone().requires_grad_()
    weight_NP = vmap(lambda x_I, key_PK: layer.attend(x_I[None], key_PK)[0])(x_NI, key_NPK)
    said_NPO = torch.stack([program(x_NI) for program in layer.programs], 1).detach()
    (each_NPK,) = torch.autograd.grad(weight_NP, key_NPK, torch.einsum("npo,no->np", said_NPO, g_NO))
    return {layer.key: each_NPK.square().sum(0)}


def _program(layer: nc.Linear, x_NI: Tensor, g_NO: Tensor) -> Sums:
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
        part_PN, _ = functional.compose_rows(
            query_MKRN, functional.sharpen(key_MPK, layer.sharpness), None, read_P[:, None], values_P,
            layer.heads, 0, layer.rules,
        )  # fmt: skip
        return part_PN[:, 0]

    part_NP = vmap(compose)(*leaves) * layer.gain
    dq_NX, dk_NMPK, dread_NP, dvalues_NP = torch.autograd.grad(part_NP, leaves, g_NO @ memory.right.detach().t())
    if reads:
        dread_NP = dread_NP + dq_NX @ controller.weight.detach()
    found: Sums = {
        controller.weight: _squares(dq_NX, seen_NC),
        controller.bias: dq_NX.square().sum(0),
    }
    if layer.bias is not None:
        found[layer.bias] = g_NO.square().sum(0)
    ones = x_NI.new_ones(len(x_NI), 1)
    banks = {"left": (dread_NP, x_NI), "right": (part_NP.detach(), g_NO), "values": (dvalues_NP, ones)}
    for (bank, (a_NP, b_NI)), d_NPK in zip(banks.items(), dk_NMPK.unbind(1), strict=True):
        slots, free = getattr(memory, bank), getattr(memory, f"{bank}_keys")
        if free is not None:
            found |= {free: d_NPK.square().sum(0), slots: _squares(a_NP, b_NI)}
            continue
        weight, bias = getattr(memory, f"{bank}_key_weight"), getattr(memory, f"{bank}_key_bias")
        slots_PI = slots.detach().view(len(slots), -1)
        found[slots] = _outer_and_keys(a_NP, b_NI, d_NPK, weight.detach())
        gram_KPP = torch.einsum("npk,nqk->kpq", d_NPK, d_NPK)
        found[weight] = ((gram_KPP @ slots_PI) * slots_PI).sum(1)
        found[bias] = d_NPK.sum(1).square().sum(0)
    return found


def _outer_and_keys(a_NP: Tensor, b_NI: Tensor, d_NPK: Tensor, weight_KI: Tensor) -> Tensor:
    """sum_n (a_n b_n^T + d_n W)^2, with no gradient of a single sample ever formed."""
    total_PI = _squares(a_NP, b_NI)
    gram_PKL = torch.einsum("npk,npl->pkl", d_NPK, d_NPK)
    total_PI += torch.einsum("pkl,ki,li->pi", gram_PKL, weight_KI, weight_KI)
    for d_NP, weight_I in zip(d_NPK.unbind(2), weight_KI, strict=True):
        total_PI += 2 * weight_I * ((a_NP * d_NP).t() @ b_NI)
    return total_PI
