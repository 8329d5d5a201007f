"""The hand-written twin of `functional.compose_rows`: fewer passes over memory, and its own backward.

It treats each row by itself, so a `vmap` over it only makes more rows: the rule folds the mapped dimension into the
rows. What the rows share (keys, singular terms) gets its gradient from ordinary operations. Second and forward-mode
derivatives go through the plain function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neurocoder.functional import PAPER, Rules
from neurocoder.functional import compose_rows as plain_compose_rows
from neurocoder.precision import BITS, full_precision, in_memory
from neurocoder.program.kept import watched
from neurocoder.program.kernel import equations, usage

_RULES = ("first_step", "usage", "least_used", "content", "order")
_BLOCK = 65536  # numbers in one step's attention: what the cache of a CPU holds several of


class Setting(NamedTuple):
    """What is no tensor."""

    heads: int
    least_used: int
    sharpness: float


class Inputs(NamedTuple):
    """What `functional.compose_rows` takes, in its order."""

    query: Tensor
    sharp: Tensor
    gate: Tensor | None
    read: Tensor
    values: Tensor
    setting: Setting


_SHARED = ("sharp", "values")  # of the inputs: by all rows, which the others have last


class Outputs(NamedTuple):
    """What `functional.compose_rows` gives, then what backward needs; without a gate, none of what belongs to it."""

    part_PN: Tensor
    sigma_RN: Tensor
    unit: Tensor
    scale: Tensor
    content_JPMHN: Tensor
    terms_JHN: Tensor
    inner_JHN: Tensor
    open_JPMHN: Tensor | None = None
    attention_JPMHN: Tensor | None = None
    usage: Tensor | None = None
    least: Tensor | None = None
    top: Tensor | None = None


def compose_rows(
    query_MKRN: Tensor,
    sharp_MPK: Tensor,
    gate: Tensor | None,
    read_PN: Tensor,
    values_P: Tensor,
    setting: Setting,
    rules: Rules,
) -> tuple[Tensor, Tensor]:
    """`functional.compose_rows`, by hand where the rules are the paper's; the compiler fuses the plain one itself."""
    inputs = Inputs(query_MKRN, sharp_MPK, gate, read_PN, values_P, setting)
    if torch.compiler.is_compiling():
        return plain(*inputs, rules)
    if gate is None and rules.order == "ascending":  # the same sum, with the components in the opposite order
        part, sigma = _in_blocks(inputs._replace(query=query_MKRN.flip(2)))
        return part, sigma.flip(0)
    matter = ("order",) if gate is None else _RULES
    if rules is not PAPER and any(getattr(rules, name) != getattr(PAPER, name) for name in matter):
        return plain(*inputs, rules)
    return _in_blocks(inputs)


def plain(query, sharp, gate, read, values, setting: Setting, rules: Rules = PAPER) -> tuple[Tensor, Tensor]:
    return plain_compose_rows(query, sharp, gate, read, values, setting.heads, setting.least_used, rules)


def _in_blocks(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """By hand; the recursion over steps, on a CPU, for as many rows at a time as its cache holds."""
    query, _, gate, read, values, setting = inputs
    # Without a derivative to take there is nothing to save. Under inference_mode, too, gradients are off.
    run: Callable[..., Any] = _Compose.apply if torch.is_grad_enabled() or watched() else _Compose.forward
    block = max(_BLOCK // (3 * len(values) * setting.heads), 1)
    if gate is None or not read.is_cpu or read.shape[1] <= block:
        return run(*inputs)[:2]
    blocks = zip(*(tensor.split(block, -1) for tensor in (query, gate, read)), strict=True)
    pieces = [run(*inputs._replace(query=q, gate=g, read=r))[:2] for q, g, r in blocks]
    part, sigma = (torch.cat(piece, -1) for piece in zip(*pieces, strict=True))
    return part, sigma


class _Compose(torch.autograd.Function):
    """From `Inputs` to `Outputs`. PyTorch wants plain tuples at these borders: only here do places count."""

    @staticmethod
    def forward(*inputs):
        return (*_forward(Inputs(*inputs)),)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.setting = inputs
        ctx.mark_non_differentiable(*(kept for kept in output[2:] if kept is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, *d_outputs):
        d_part, d_sigma, *_ = d_outputs
        saved, given = ctx.saved_tensors, len(Inputs._fields) - 1
        inputs, outputs = Inputs(*saved[:given], ctx.setting), Outputs(*saved[given:])
        d_part = torch.zeros_like(outputs.part_PN) if d_part is None else d_part
        d_sigma = torch.zeros_like(outputs.sigma_RN) if d_sigma is None else d_sigma
        if torch.is_grad_enabled() or not in_memory(d_part):  # to be differentiated in turn, or a batch of gradients
            run, tensors = _differentiable(inputs)
            d_tensors = torch.func.vjp(run, *tensors.values())[1]((d_part, d_sigma))
            by_name = dict(zip(tensors, d_tensors, strict=True))
            return tuple(by_name.get(name) for name in Inputs._fields)
        with full_precision(d_part):
            return (*_backward(d_part, d_sigma, inputs, outputs),)

    @staticmethod
    def jvp(ctx, *tangents):
        run, tensors = _differentiable(Inputs(*ctx.saved_tensors[: len(Inputs._fields) - 1], ctx.setting))
        given = Inputs(*tangents)._asdict()
        along = [torch.zeros_like(tensor) if given[name] is None else given[name] for name, tensor in tensors.items()]
        _, (part, sigma) = torch.func.jvp(run, (*tensors.values(),), (*along,))[:2]
        return (*Outputs(part, sigma, *[None] * (len(Outputs._fields) - 2)),)

    @staticmethod
    def vmap(info, in_dims, *inputs):
        dims = dict(zip(Inputs._fields, in_dims, strict=True))
        if any(dims[name] is not None for name in _SHARED):
            return _each(info.batch_size, dims, Inputs(*inputs))
        return _folded(info.batch_size, dims, Inputs(*inputs))


def _differentiable(inputs: Inputs) -> tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """The plain function of the tensors that are given, and those tensors."""
    tensors = {name: value for name, value in inputs._asdict().items() if isinstance(value, Tensor)}
    return lambda *given: plain(*inputs._replace(**dict(zip(tensors, given, strict=True)))), tensors


def _each(size: int, dims: dict[str, int | None], inputs: Inputs) -> tuple[tuple, tuple]:
    """The vmap rule where something that rows share is mapped: each member gets a call of its own."""
    mapped = {name: dims[name] for name, value in inputs._asdict().items() if isinstance(value, Tensor)}
    calls = []
    for i in range(size):
        own = {n: getattr(inputs, n).select(dim, i) for n, dim in mapped.items() if dim is not None}
        calls.append(_Compose.apply(*inputs._replace(**own)))
    outputs = tuple(None if members[0] is None else torch.stack(members) for members in zip(*calls, strict=True))
    return outputs, tuple(None if output is None else 0 for output in outputs)


def _folded(size: int, dims: dict[str, int | None], inputs: Inputs) -> tuple[tuple, tuple]:
    """The vmap rule where only rows are mapped: so many more rows."""
    more = {}
    for name, value in inputs._asdict().items():
        if isinstance(value, Tensor) and name not in _SHARED:
            value = value.unsqueeze(0) if dims[name] is None else value.movedim(dims[name], 0)
            more[name] = value.expand(size, *value.shape[1:]).movedim(0, -2).flatten(-2)
    outputs = _Compose.apply(*inputs._replace(**more))
    outputs = tuple(None if output is None else output.unflatten(-1, (size, -1)) for output in outputs)
    return outputs, tuple(None if output is None else output.dim() - 2 for output in outputs)


def _forward(inputs: Inputs) -> Outputs:
    query, sharp, gate, read, values, (heads, least_used, sharpness) = inputs
    components, rows = query.shape[2:]
    steps, together = (1, components) if gate is None else (components // heads, heads)
    unit, scale = equations.unit_queries(query)
    score_MPX = equations.score(unit, sharp * BITS, sharpness)
    content = equations.exponential(equations.by_step(score_MPX, steps, together, rows))
    del score_MPX  # what is freed here is written next, while it is in the cache
    attention, recursion = equations.normalise(content), ()
    if gate is not None:
        open_ = usage.opened(gate, heads)
        recursed = usage.attend(content, open_, least_used)
        attention, recursion = recursed.attention_JPMHN, (open_, *recursed)
    left, right, weights = attention.unbind(2)
    sigma_RN, terms = equations.singular_values(values, weights)
    part_PN, inner = equations.transform(read, left, sigma_RN, right)
    return Outputs(part_PN, sigma_RN, unit, scale, content, terms, inner, *recursion)


def _backward(d_part_PN: Tensor, d_sigma_RN: Tensor, inputs: Inputs, kept: Outputs) -> Inputs:
    """The gradients of the inputs: the equations of `_forward`, last one first."""
    content, gate, open_ = kept.content_JPMHN, inputs.gate, kept.open_JPMHN
    left, right, weights = (content if gate is None else kept.attention_JPMHN).unbind(2)
    d_attention = torch.empty_like(content)
    d_left, d_right, d_weights = d_attention.unbind(2)
    d_read, d_sigma_JHN = equations.transform_backward(
        d_part_PN, d_sigma_RN, inputs.read, left, kept.sigma_RN, right, kept.inner_JHN, d_left, d_right
    )
    d_values = equations.singular_values_backward(d_sigma_JHN, inputs.values, weights, kept.terms_JHN, d_weights)
    d_gate = None
    if gate is not None and open_ is not None:
        shut, steps = 1 - open_, usage.Steps(kept.attention_JPMHN, kept.usage, kept.least, kept.top)
        d_open = usage.attend_backward(d_attention, content, shut, steps)
        d_gate = usage.opened_backward(d_open, open_, shut, shared=gate.shape[2] == 1)
        d_attention.mul_(open_)  # from here on it is that of content attention
    d_score_MPX = equations.content_backward(d_attention, content)
    d_unit, d_sharp = equations.score_backward(d_score_MPX, kept.unit, inputs.sharp)
    d_query = equations.unit_queries_backward(d_unit, kept.unit, kept.scale)
    return Inputs(d_query, d_sharp, d_gate, d_read, d_values, None)
