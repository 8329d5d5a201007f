"""Networks for streams of tasks whose heads read a few slots of a large memory; and what they are compared with.

`sparse` composes nothing but the outputs: each head adds the row that it reads, weighed by a singular value that does
not learn, and which row that is depends on the input by addresses that are fixed at random. Other variants change one
thing of it; `learned` one of `top-2`, since addresses of a single slot have no gradient, `soft-reads` one of `top-4`;
`two-hidden` is another network of such layers. Plain layers, experts and PEER get as many parameters to train, but
`linear` and `features`. `winners` has all that `sparse` has but its way to the rows: as many of them, as many that an
image reads, and only those move.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab import cache
from neurocoder_lab.continual.stream import MultiHead, Scenario
from neurocoder_lab.networks import Peer, mlp

Variant = Literal[
    "sparse",
    "balanced",
    "balanced-512",
    "balanced-winners",
    "slots-256",
    "slots-1024",
    "slots-4096",
    "top-2",
    "top-4",
    "learned",
    "ordinary",
    "heads-32",
    "heads-512",
    "soft-reads",
    "residual",
    "shared-first",
    "two-hidden",
    "linear",
    "features",
    "winners",
    "mlp",
    "moe",
    "peer",
]
VARIANTS: tuple[Variant, ...] = Variant.__args__
CENTRE: dict[str, Any] = {
    "slots": 65_536, "heads": 128, "key_dim": 32, "top_k": 1, "one_choice": True, "addresses": "fixed",
    "product_keys": True, "sparse": True,
}  # fmt: skip
CHANGES: dict[Variant, dict[str, Any]] = {
    "sparse": {},
    "balanced": {},
    "balanced-512": {"heads": 512},
    "slots-256": {"slots": 256},
    "slots-1024": {"slots": 1024},
    "slots-4096": {"slots": 4096},
    "top-2": {"top_k": 2},
    "top-4": {"top_k": 4},
    "learned": {"addresses": "learned", "top_k": 2},
    "ordinary": {"sparse": False},
    "heads-32": {"heads": 32},
    "heads-512": {"heads": 512},
    "soft-reads": {"top_k": 4, "sharpness": 1.0},
    "residual": {},
    "shared-first": {},
    "two-hidden": {"slots": 1024, "heads": 8, "key_dim": 5, "product_keys": False},
}
NAMES: dict[Variant, str] = {
    "sparse": "65,536 slots, 128 heads, the best slot each, addresses fixed, only rows that were read move",
    "balanced": "as sparse, at a rate chosen for both, the domain scenario and all classes at once",
    "balanced-512": "the same with 512 heads",
    "balanced-winners": "as winners, at a rate chosen for both",
    "slots-256": "256 slots, and so fewer parameters",
    "slots-1024": "1,024 slots, and so fewer parameters",
    "slots-4096": "4,096 slots, and so fewer parameters",
    "top-2": "the best 2 slots a head",
    "top-4": "the best 4 slots a head",
    "learned": "the best 2 slots a head, addresses learned, and so many more parameters",
    "ordinary": "ordinary Adam: rows that were not read move, too",
    "heads-32": "32 heads",
    "heads-512": "512 heads",
    "soft-reads": "the best 4 slots a head, softer: sharpness 1",
    "residual": "beside a plain linear layer",
    "shared-first": "behind a plain hidden layer of 256",
    "two-hidden": "two hidden layers of 256: 1,024 slots, 8 heads, keys of 5; plain output layer",
    "linear": "plain linear layer of the input",
    "features": "plain linear layer of 4,096 fixed random features through ReLU",
    "winners": "a row for each of 65,536 fixed random features; of an image, those of its 128 largest by their values",
    "mlp": "plain MLP of as many parameters",
    "moe": "mixture of 8 experts, 1 a row by gates that learn an even load, of as many parameters",
    "peer": "PEER: 4 heads, the best 2 each of 49 rank-one experts and more, of as many parameters; plain output layer",
}
CODES: tuple[Variant, ...] = ("winners", "balanced-winners")  # whose head is a `Table`
HIDDEN = 256
FEATURES, WINNERS = 4096, 128
CLASSES = 10
AT_ONCE = 500  # inputs of which the rows are looked up
KEPT = 4 * 2**30  # bytes of rows that were looked up, on disk
SCALE = 30.0  # of the outputs, beside what suits a fresh layer: a step of Adam moves them as much further
EXPERTS = 8
PEER = {"heads": 4, "reads": 2, "key_dim": 3}  # of one read the scores have no gradient


def build(variant: Variant, scenario: Scenario | Literal["joint"], width: int) -> nn.Module:
    """The network on inputs of this width; in the task scenario with an output layer for each task."""
    outputs = 2 if scenario == "domain" else CLASSES
    body, wide = _body(variant, width, CENTRE["slots"] * outputs)
    if scenario == "task":
        first, count = _head(variant, wide, 2), CLASSES // 2
        heads = [deepcopy(first) if isinstance(first, Rows) else _head(variant, wide, 2) for _ in range(1, count)]
        return MultiHead(nn.Sequential(*body), [first, *heads])  # rows begin alike, and have the same addresses
    return nn.Sequential(*body, _head(variant, wide, outputs))


def _head(variant: Variant, wide: int, outputs: int) -> nn.Module:
    if variant in CODES:
        return Table(outputs)
    if variant == "two-hidden" or variant not in CHANGES:
        return nn.Linear(wide, outputs)
    return Rows(wide, outputs, variant == "residual", **CENTRE | CHANGES[variant])


def looker(network: nn.Module) -> Rows | Features | Winners | None:
    """What inputs meet first, if what it finds about them never changes: they need be looked at once. Where tasks have
    heads of their own, these find the same."""
    path = [*network.body.children(), network.heads[0]] if isinstance(network, MultiHead) else [*network.children()]
    return path[0] if isinstance(path[0], Rows | Features | Winners) and path[0].looks_once else None


def _look(find: Callable[[Tensor], Tensor], x: Tensor, *addresses: Tensor) -> Tensor:
    """What `find` finds about inputs by fixed addresses. It takes longer than to learn from it, and is kept for other
    runs of the same addresses, which differ in their rate, say."""
    folder, name = cache.folder() / "reads", cache.digest(x, *addresses)

    def make() -> tuple[cache.Tensors, dict[str, str]]:
        return {"found": torch.cat([find(some) for some in x.split(AT_ONCE)])}, {}

    found = cache.kept(folder / f"{name}.safetensors", name, make)[0]["found"]
    cache.trim(folder, KEPT)
    return found


class Rows(nn.Module):
    """A sum of rows of a memory, that of each head; beside a plain linear layer, if asked.

    It takes inputs (B, I), or the rows that these read, (B, heads), as `look` finds them. Rows begin at zero and are
    all that learns of the memory, but addresses where these do: a slot's part in what others add does not change.
    """

    def __init__(self, inputs: int, outputs: int, residual: bool = False, **settings: Any):
        super().__init__()
        self.layer = nc.Linear(1, outputs, control_features=inputs, **settings)
        self.residual = nn.Linear(inputs, outputs, bias=False) if residual else None
        with torch.no_grad():
            self.layer.memory.left.fill_(1)
            self.layer.memory.right.zero_()
            self.layer.bias.zero_()
            self.layer.gain.mul_(SCALE)
        for name, parameter in self.layer.memory.named_parameters():
            parameter.requires_grad_(not name.startswith(("left", "values")))

    def forward(self, x: Tensor) -> Tensor:
        one = self.layer.gain.new_ones(len(x), 1)
        if not x.is_floating_point():
            return self.layer(one, reads=x.long()[:, None, :, None].expand(-1, 3, -1, -1))
        y = self.layer(one, x)
        return y if self.residual is None else y + self.residual(x)

    @property
    def looks_once(self) -> bool:
        """Whether what an input reads is all that counts of it, and never changes."""
        return self.layer.looks_once and self.residual is None

    def look(self, x: Tensor) -> Tensor:
        """The rows that inputs read, where each head reads one."""

        def find(some: Tensor) -> Tensor:
            return self.layer.reads(some.new_ones(len(some), 1), some)[:, 0, :, 0].int()

        return _look(find, x, *(tensor for name, tensor in self.layer.named_buffers() if name != "gain"))


class Features(nn.Module):
    """Fixed random features: the input times numbers that are drawn once, through ReLU.

    It takes inputs (B, I), or what `look` found of them, (B, FEATURES).
    """

    looks_once = True

    def __init__(self, inputs: int):
        super().__init__()
        self.register_buffer("weight", torch.randn(FEATURES, inputs) * inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[1] == FEATURES else nn.functional.linear(x, self.weight).relu()

    def look(self, x: Tensor) -> Tensor:
        return torch.cat([self(some) for some in x.split(AT_ONCE)])


class Winners(nn.Module):
    """The largest of many fixed random features: their places and their values, (B, 2, W).

    It takes inputs (B, I), or what `look` found of them. What is drawn is large, and not saved: the seed draws it.
    """

    looks_once = True

    def __init__(self, inputs: int):
        super().__init__()
        weight = torch.randn(CENTRE["slots"], inputs).mul_(inputs**-0.5)
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return x
        best = nn.functional.linear(x, self.weight).topk(WINNERS, 1, sorted=False)
        return torch.stack((best.indices.to(x.dtype), best.values), 1)  # a float tells so many places apart

    def look(self, x: Tensor) -> Tensor:
        return _look(self, x, self.weight)


class Table(nn.Module):
    """A row of outputs for each feature; those of an input are added up by their values. Only rows that were read move,
    as those of the memory."""

    def __init__(self, outputs: int):
        super().__init__()
        self.rows = nn.EmbeddingBag(CENTRE["slots"], outputs, mode="sum", sparse=True)
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.zeros_(self.rows.weight)

    def forward(self, code_B2W: Tensor) -> Tensor:
        place, value = code_B2W.unbind(1)
        return self.rows(place.long(), per_sample_weights=value) + self.bias


def _body(variant: Variant, width: int, size: int) -> tuple[list[nn.Module], int]:
    """What comes before the output layer, and how wide it is; `size` are the parameters of the memory of `sparse`."""
    if variant == "features":
        return [Features(width)], FEATURES
    if variant in CODES:
        return [Winners(width)], CENTRE["slots"]
    if variant == "peer":
        queries = 2 * PEER["heads"] * PEER["key_dim"] * width
        layer: nn.Module = Peer(width, round(((size - queries) / (2 * width)) ** 0.5) ** 2, **PEER)
        return [layer], width
    if variant == "shared-first":
        return [nn.Linear(width, HIDDEN), nn.ReLU()], HIDDEN
    if variant == "two-hidden":
        settings = CENTRE | CHANGES[variant]
        layers = [nc.Linear(*pair, **settings) for pair in ((width, HIDDEN), (HIDDEN, HIDDEN))]
        return [module for layer in layers for module in (layer, nn.ReLU())], HIDDEN
    if variant not in ("mlp", "moe"):
        return [], width
    each = size if variant == "mlp" else size / EXPERTS - 2 * width  # each expert's gate and its noise
    wide = round(((width**2 + 4 * each) ** 0.5 - width) / 2)
    body = nn.Sequential(*mlp(width, wide, wide, bias=False), nn.ReLU())
    if variant == "moe":
        nc.recode(body, ["0", "2"], nc.peers.MixtureOfExperts, experts=EXPERTS, top_k=1)
    return [*body], wide
