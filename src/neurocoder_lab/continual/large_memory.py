"""Networks for streams of tasks whose heads read a few slots of a large memory; and what they are compared with.

`sparse` composes nothing but the outputs: each head adds the row that it reads, weighed by a singular value that does
not learn, and which row that is depends on the input by addresses that are fixed at random. Other variants change one
thing of it; `learned` one of `top-2`, since addresses of a single slot have no gradient, `soft-reads` one of `top-4`;
`two-hidden` is another network of such layers. Plain layers, experts and PEER get as many parameters to train, but
`linear`, `features` and `winners`: the last two have fixed random features without the memory.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab import tuning
from neurocoder_lab.continual.stream import MultiHead, Scenario
from neurocoder_lab.networks import Peer, mlp

Variant = Literal[
    "sparse",
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
    "winners": "the same, but of an image only its 256 largest features",
    "mlp": "plain MLP of as many parameters",
    "moe": "mixture of 8 experts, 1 a row by gates that learn an even load, of as many parameters",
    "peer": "PEER: 4 heads, the best 2 each of 49 rank-one experts and more, of as many parameters; plain output layer",
}
ALIKE: tuple[Variant, ...] = ("sparse", "top-2", "top-4", "ordinary", "heads-32", "soft-reads")  # in size
HIDDEN = 256
FEATURES, WINNERS = 4096, 256
CLASSES = 10
AT_ONCE = 500  # inputs of which the rows are looked up
SCALE = 30.0  # of the outputs, beside what suits a fresh layer: a step of Adam moves them as much further
EXPERTS = 8
PEER = {"heads": 4, "reads": 2, "key_dim": 3}  # of one read the scores have no gradient


def build(variant: Variant, scenario: Scenario | Literal["joint"], width: int) -> nn.Module:
    """The network on inputs of this width."""
    outputs = 2 if scenario == "domain" else CLASSES
    body, wide = _body(variant, width, CENTRE["slots"] * outputs)
    if variant in CHANGES and variant != "two-hidden":
        rows = Rows(wide, outputs, variant == "residual", **CENTRE | CHANGES[variant])
        network = nn.Sequential(*body, rows)
        return MultiHead(network, [Columns(task) for task in range(5)]) if scenario == "task" else network
    if scenario == "task":
        return MultiHead(nn.Sequential(*body), [nn.Linear(wide, 2) for _ in range(5)])
    return nn.Sequential(*body, nn.Linear(wide, outputs))


class Columns(nn.Module):
    """The two outputs of a task among those of all."""

    def __init__(self, task: int):
        super().__init__()
        self.task = task

    def forward(self, y: Tensor) -> Tensor:
        return y[:, 2 * self.task : 2 * self.task + 2]


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
        each = (self.layer.reads(some.new_ones(len(some), 1), some) for some in x.split(AT_ONCE))
        return torch.cat([reads[:, 0, :, 0].int() for reads in each])


class Features(nn.Module):
    """Fixed random features: the input times numbers that are drawn once, through ReLU, or the largest alone."""

    def __init__(self, inputs: int, outputs: int, winners: int | None = None):
        super().__init__()
        self.register_buffer("weight", torch.randn(outputs, inputs) * inputs**-0.5)
        self.winners = winners

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight)
        if self.winners is None:
            return y.relu()
        best = y.topk(self.winners, 1)
        return torch.zeros_like(y).scatter(1, best.indices, best.values)


def _body(variant: Variant, width: int, size: int) -> tuple[list[nn.Module], int]:
    """What comes before the output layer, and how wide it is; `size` are the parameters of the memory of `sparse`."""
    if variant in ("features", "winners"):
        return [Features(width, FEATURES, WINNERS if variant == "winners" else None)], FEATURES
    if variant == "peer":
        queries = 2 * PEER["heads"] * PEER["key_dim"] * width
        return [Peer(width, round(((size - queries) / (2 * width)) ** 0.5) ** 2, **PEER)], width
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


def tuned(dataset: str) -> list[tuning.Row]:
    """What tuning found about the rate of each variant in the domain scenario."""
    places = [{"variant": variant, "scenario": "domain", "dataset": dataset} for variant in VARIANTS]
    return [row for row in tuning.known() if row["experiment"] == "large-memory" and row["place"] in places]


def chosen() -> Variant:
    """The variant that our claims speak of: of those alike, the one that held-out digits prefer in the domain scenario,
    each with its own rate."""
    rows = {row["place"]["variant"]: tuning.chosen(row)["mean"] for row in tuned("mnist")}
    return max(ALIKE, key=lambda variant: rows.get(variant, 0.0))
