"""The diagonal Fisher information of a classifier: gradients of each sample squared, then averaged.

One forward and backward for many samples gives, for every layer called, its inputs and the gradients of its outputs,
row by row: from these closed_forms.py has the sum of squares. Any other parameter is left to `torch.func`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from neurocoder.walk import evaluating
from neurocoder_lab.continual.closed_forms import Sums, owned, rule_of
from neurocoder_lab.continual.stream import MultiHead

BATCH = 500
FEW = 32  # samples at once where every sample has a gradient of its own
TRIAL = 4  # samples on which a closed form is tried
# Of the largest squared gradient. With the models of tests/lab/test_fisher.py, 40 seeds each, a right closed form is
# off by rounding, at most 1e-5 in single precision and mostly below 0.03 in bfloat16, a wrong one by 0.1 at least. One
# that is refused for its rounding costs time alone: its gradients are taken sample by sample.
TOLERANCE = 0.03
Outputs = Callable[[Tensor], Tensor]
Call = tuple[nn.Module, tuple, Tensor]  # a layer, what it was given, its output


def fisher(
    model: nn.Module,
    x: Tensor,
    outputs: Outputs | None = None,
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
        covered = {p for layer in layers for p in owned(layer)}
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
def _calls(layers: Iterable[nn.Module]) -> Iterator[list[Call]]:
    """Calls of the layers inside the block."""
    calls: list[Call] = []

    def note(layer: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        calls.append((layer, (*args, *kwargs.values()), output))
        return output.clone()  # what comes next may work in place

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _plan(model: nn.Module, outputs: Outputs, x: Tensor, squares: Sums) -> list[nn.Module]:
    """The layers that are left to their closed form: those that may be, as far as a trial of a few samples shows."""
    few = x[torch.linspace(0, len(x) - 1, TRIAL).long()]
    with _calls(layer for layer in model.modules() if rule_of(layer)) as calls:
        labels = outputs(few).detach().argmin(-1)  # the least likely, where gradients are large
    eligible = _eligible(model, calls, squares)
    wrong = _wrong(eligible, outputs, few, labels, squares) if eligible else set()
    return [layer for layer in eligible if not wrong & {*owned(layer)}]


def _eligible(model: nn.Module, calls: list[Call], squares: Sums) -> list[nn.Module]:
    """Layers to train that were called once, on one row a sample, and whose parameters are theirs alone."""
    times = Counter(layer for layer, _, _ in calls)
    holders = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    owners = Counter(p for layer in times for p in owned(layer))
    eligible = []
    for layer, given, output in calls:
        alone = all(owners[p] == holders[p] == 1 for p in owned(layer))
        rows = len(given) == 1 + getattr(layer, "controlled", False) and all(map(_a_row_each, given))
        trained = output.requires_grad and any(p in squares for p in owned(layer))
        if times[layer] == 1 and alone and rows and trained:
            eligible.append(layer)
    return eligible


def _a_row_each(x: Tensor) -> bool:
    return x.shape[:-1] == (TRIAL,) or (not x.is_floating_point() and len(x) == TRIAL)  # features, or slots


def _wrong(layers: list[nn.Module], outputs: Outputs, x: Tensor, y: Tensor, squares: Sums) -> set[Tensor]:
    """Parameters whose closed form is not the sum of squared gradients: the model does more with them."""
    wanted = [p for layer in layers for p in owned(layer) if p in squares]
    closed, known = ({p: torch.zeros_like(p) for p in wanted} for _ in range(2))
    _closed(layers, outputs, x, y, closed, [])
    for one, label in zip(x.split(1), y.split(1), strict=True):
        gradients = torch.autograd.grad(_loss(outputs(one), label), wanted, allow_unused=True)
        for p, g in zip(wanted, gradients, strict=True):
            known[p] += 0 if g is None else g.to_dense().square()

    def agrees(p: Tensor) -> bool:
        return torch.allclose(closed[p], known[p], rtol=0, atol=TOLERANCE * known[p].abs().max().item() + 1e-30)

    return {p for p in wanted if not agrees(p)}


def _closed(
    layers: list[nn.Module],
    outputs: Outputs,
    x: Tensor,
    y: Tensor | None,
    squares: Sums,
    others: list[Tensor],
) -> set[Tensor]:
    """Add the squared gradients of the layers' parameters; returns those of the other parameters that have one too."""
    with _calls(layers) as calls:
        loss = _loss(outputs(x), y)
    wanted = [output for _, _, output in calls] + others
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
    for (layer, given, _), g in zip(calls, gradients, strict=False):
        if g is not None:
            dtype = owned(layer)[0].dtype  # not that of an autocast
            inputs = (x.detach().to(dtype) if x.is_floating_point() else x for x in given)
            for p, squared in rule_of(layer)(layer, g.to(dtype), *inputs).items():
                if p in squares:
                    squares[p] += squared.view_as(p)
    return {p for p, g in zip(others, gradients[len(calls) :], strict=True) if g is not None}


def _sample_by_sample(
    model: nn.Module,
    outputs: Outputs,
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
                torch.zeros_like(p)[None] if g is None else g.to_dense()[None]
                for p, g in zip(parameters, torch.autograd.grad(alone, parameters, allow_unused=True), strict=True)
            ]
        for p, g in zip(parameters, gradients, strict=True):
            squares[p] += g.detach().square().sum(0)


def _shared(
    extra: Callable[[], Tensor],
    outputs: Outputs,
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
            squares[p] += len(rows) * e.square() + (0 if g is None else 2 * e * g.to_dense())


class _Wrapped(nn.Module):
    """The outputs as a module, so that `functional_call` reaches the model inside."""

    def __init__(self, model: nn.Module, outputs: Outputs):
        super().__init__()
        self.model, self.outputs = model, (outputs,)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs[0](x)
