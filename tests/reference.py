"""Slow twins: the paper's equations as loops over inputs, steps, heads and slots. To be read beside the paper."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.program.controller import LstmController

BANKS = ("left", "right", "values")


def linear(layer: nc.Linear, x: Tensor, control: Tensor | None = None) -> Tensor:
    """What `layer(x, control)` must give; a control row serves all rows of x that begin with its index."""
    rows = x.reshape(-1, layer.in_features)
    if control is None:
        control = torch.stack([layer.memory.left @ row for row in rows]) if reads(layer) else x
    programs = [program(layer, c)[0] for c in control.reshape(-1, layer.control_features)]
    share = len(rows) // max(len(programs), 1)
    outputs = [row @ programs[n // share] for n, row in enumerate(rows)]
    y = torch.stack(outputs).reshape(*x.shape[:-1], layer.out_features)
    if layer.bias is not None:
        y = y + layer.bias
    return y if layer.base is None else y + layer.base(x)


def reads(layer: nc.Linear | nc.Conv2d) -> bool:
    """Whether the controller sees x M_U^T instead of x."""
    return layer.controller_sees == "read"


def conv2d(layer: nc.Conv2d, x: Tensor) -> Tensor:
    """One ordinary convolution an image, with that image's kernel."""
    outputs = []
    for image in x:
        padding, padded = layer.padding, image[None]
        if layer.padding_mode != "zeros":
            high, wide = layer.padding
            padded, padding = F.pad(padded, (wide, wide, high, high), mode=layer.padding_mode), 0
        control = image.mean((1, 2))
        if reads(layer):  # each left program is a kernel; its responses are averaged over positions and groups
            kernels = [left.reshape(1, -1, *layer.kernel_size) for left in layer.memory.left]
            window = (layer.stride, padding, layer.dilation)
            parts = padded.chunk(layer.groups, 1)
            control = torch.stack([sum(F.conv2d(part, k, None, *window).mean() for part in parts) for k in kernels])
            control = control / layer.groups
        weight = program(layer, control)[0].t().reshape(layer.out_channels, -1, *layer.kernel_size)
        outputs.append(F.conv2d(padded, weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)[0])
    return torch.stack(outputs)


def program(layer, control: Tensor) -> tuple[Tensor, dict[str, list[list[Tensor]]], list[Tensor]]:
    """The working program W_t (in, out) of one control vector, with its attention [n][i] and singular values [n]."""
    memory, rules = layer.memory, layer.rules
    queries, states = compose_queries(layer, control)
    one = len(queries[0]) == 1  # one choice of slots for the three banks
    attention = {
        bank: attend(layer, m, bank, [step[0 if one else m] for step in queries], control, states)
        for m, bank in enumerate(BANKS)
    }
    components = range(layer.steps * layer.heads)
    slots = range(layer.slots)
    u = [sum(attention["left"][n][i] * memory.left[i] for i in slots) for n in components]  # Eq. 6
    v = [sum(attention["right"][n][i] * memory.right[i] for i in slots) for n in components]  # Eq. 7
    terms = [F.softplus(sum(attention["values"][n][i] * memory.values[i] for i in slots)) for n in components]
    sigma: list[Tensor] = [terms[0]] * len(terms)
    if rules.order == "descending":  # Eq. 8
        sigma[-1] = terms[-1]
        for n in reversed(components[:-1]):
            sigma[n] = sigma[n + 1] + terms[n]
    else:
        sums = [sum(terms[: n + 1], torch.zeros_like(terms[0])) for n in components]
        sigma = sums[::-1] if rules.order == "first" else sums
    working = layer.gain * sum(sigma[n] * torch.outer(u[n], v[n]) for n in components)  # Eq. 4
    if layer.residual is not None:  # Eq. 15
        if rules.integration == "lstm":
            opening = states[-1][-1]
        else:
            opening = layer.integration_weight[0] @ control + layer.integration_bias[0]
        smallest = sigma[0] if rules.order == "ascending" else sigma[-1]
        working = working + opening.sigmoid() * smallest * layer.residual.flatten(1).t()
    return working, attention, sigma


def compose_queries(layer, control: Tensor) -> tuple[list, list[Tensor]]:
    """Eq. 9: queries [j][memory][h], each (key_dim,), and the controller's state of each step."""
    controller, steps, heads, size = layer.controller, layer.steps, layer.heads, layer.key_dim
    signal = controller.weight @ control + controller.bias
    if not isinstance(controller, LstmController):
        by = signal.reshape(-1, size, steps, heads)
        return [[[by[m, :, j, h] for h in range(heads)] for m in range(len(by))] for j in range(steps)], []
    units = controller.units
    state = cell = torch.zeros(units, dtype=control.dtype)
    if controller.state is not None:
        state, cell = controller.state
        signal = signal + controller.recurrent_bias
    queries, states = [], []
    for _ in range(steps):
        total = signal if controller.recurrent is None else signal + controller.recurrent @ state
        i, f, o, g = (total[k * units : (k + 1) * units] for k in range(4))
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = o.sigmoid() * cell.tanh()
        said = state if controller.query is None else controller.query @ state
        banks = len(layer.addressing.banks)
        by = said[: banks * size * heads].reshape(banks, size, heads)
        queries.append([[by[m, :, h] for h in range(heads)] for m in range(banks)])
        states.append(state)
    return queries, states


def key(layer, bank: str, i: int) -> Tensor:
    """Eq. 10."""
    free = layer.memory.free_keys("shared" if layer.addressing.one_choice else bank)
    if free is not None and layer.addressing.product_keys:
        first, second = free
        return torch.cat((first[i // len(first)], second[i % len(first)]))
    if free is not None:
        return free[i]
    slot = getattr(layer.memory, bank)[i].reshape(-1)
    return getattr(layer.memory, f"{bank}_key_weight") @ slot + getattr(layer.memory, f"{bank}_key_bias")


def attend(layer, m: int, bank: str, queries: list, control: Tensor, states: list[Tensor]) -> list[list[Tensor]]:
    """Attention [n][i] to one bank: Eq. 11 to 14."""
    memory, rules, slots, heads = layer.memory, layer.rules, layer.slots, layer.heads
    keys = [key(layer, bank, i) for i in range(slots)]
    gated = memory.gate_weight is not None
    done: list[list[list[Tensor]]] = []  # [j][h][i]
    for j in range(layer.steps):
        done.append([])
        for h in range(heads):
            q = queries[j][h]
            cosines = [cosine(layer, q, k) * layer.sharpness for k in keys]
            best = sorted(range(slots), key=lambda i: -cosines[i].item())[: layer.addressing.top_k]
            total = sum(cosines[i].exp() for i in best)
            content = [c.exp() / total if i in best else 0.0 * c for i, c in enumerate(cosines)]  # Eq. 11
            if not gated:
                done[j].append(content)
                continue
            if rules.content == "peak":
                peak = max(content, key=Tensor.item)
                content = [c / peak for c in content]
            least = least_used(layer, done[:j], h)
            weights = []
            for i in range(slots):
                seen, weight = control, memory.gate_weight[m, i]
                if rules.gate == "state":
                    seen, weight = states[j], weight.reshape(heads, -1)[h]
                gate = (weight @ seen + memory.gate_bias[m, i]).sigmoid()
                weights.append(gate * content[i] + (1 - gate) * least[i])  # Eq. 14
            done[j].append(weights)
    return [done[j][h] for j in range(layer.steps) for h in range(heads)]


def cosine(layer, q: Tensor, k: Tensor) -> Tensor:
    """Of product keys, the mean of those of the halves."""
    if not layer.addressing.product_keys:
        return q @ k / (norm(q) * norm(k))
    return sum(a @ b / (norm(a) * norm(b)) for a, b in zip(q.chunk(2), k.chunk(2), strict=True)) / 2


def norm(x: Tensor) -> Tensor:
    return (x @ x + 1e-6).sqrt()


def least_used(layer, earlier: list[list[list[Tensor]]], h: int) -> list:
    """Eq. 12 and 13, from the attention [j][h][i] of the earlier steps."""
    rules, slots = layer.rules, layer.slots
    if not earlier:
        if rules.first_step == "zero":
            return [0.0] * slots
        return [1.0 if i < layer.least_used else 0.0 for i in range(slots)]
    usage = []
    for i in range(slots):
        used = [step[k][i] for step in earlier for k in (range(layer.heads) if rules.usage == "all" else [h])]
        usage.append(max(used, key=Tensor.item))  # Eq. 12
    threshold = sorted(m.item() for m in usage)[layer.least_used - 1]
    top = max(usage, key=Tensor.item) if rules.least_used == "max" else 1.0
    return [top - m if m.item() <= threshold else 0.0 * m for m in usage]  # Eq. 13


def mixture(layer: nc.peers.MixtureOfExperts, x: Tensor, gates: Tensor) -> Tensor:
    """Eq. 1 to 5 of Shazeer et al. for one input, whose gates before top-k are given."""
    order = sorted(range(len(gates)), key=lambda i: -gates[i].item())[: layer.top_k]
    total = sum(gates[i].exp() for i in order)
    return sum(gates[i].exp() / total * layer.experts[i](x) for i in order)
