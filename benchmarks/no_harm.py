"""What `nc.recode(model, "*")` does to three networks, beside the same networks plain, seed by seed.

    NEUROCODER_DATA=... python benchmarks/no_harm.py --seeds 10 --out benchmarks/results/no_harm.json

cnn: two 3 x 3 convolutions of 32 and 64 with batch norm, ReLU and pooling, 4096-128-10; mlp: 3072-384-192-10; both on
5,000 images of CIFAR-10, 3 epochs of Adam at 0.001, batch 100, test accuracy in percent. gru: the polynomials' GRU 2-32
with its head, 500 steps of 128 fresh sequences, Adam at `--rate`, held-out error. Both networks of a pair start from
the same weights and see the same batches. Nothing is chosen on the test data.

`share`: of the variance of each re-coded layer's output, over test inputs, what the composed part makes up. `off`: the
re-coded network with the composed part switched off; `held`: with one program for all inputs, that of a control of
zero. `step`: time of forward, backward and Adam over that of the plain network, interleaved, one thread, medians.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.program.layer import ProgramLayer
from neurocoder.walk import conditional_layers
from neurocoder_lab.data import images
from neurocoder_lab.experiments.polynomial import BATCH, CHUNKS, sequences
from neurocoder_lab.networks import Recurrent, mlp
from neurocoder_lab.run import source

IMAGES, EPOCHS, STEPS = 5000, 3, 500
Name = Literal["cnn", "mlp", "gru"]
Batches = Iterator[tuple[Tensor, Tensor]]


def cnn() -> nn.Sequential:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(3, 32), *block(32, 64), nn.Flatten(), mlp(4096, 128, 10))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "cnn": cnn,
    "mlp": lambda: nn.Sequential(nn.Flatten(), mlp(3072, 384, 192, 10)),
    "gru": lambda: Recurrent(2, 32),
}


class Pictures:
    """CIFAR-10, normalised by its first images."""

    def __init__(self) -> None:
        data = images("cifar10")
        x, y = (t[:IMAGES] for t in data.train)
        x, seen = x.float(), data.test[0].float()
        mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
        self.train, self.test = ((x - mean) / std, y), ((seen - mean) / std, data.test[1])
        self.rate = 1e-3

    def batches(self, seed: int) -> Batches:
        generator, (x, y) = torch.Generator().manual_seed(seed), self.train
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(x), generator=generator).split(100):
                yield x[rows], y[rows]

    @staticmethod
    def loss(said: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(said, y)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        model.eval()
        pairs = zip(*(t.split(500) for t in self.test), strict=True)
        return 100 * sum((model(x).argmax(1) == y).sum().item() for x, y in pairs) / len(self.test[1])


class Polynomials:
    def __init__(self, rate: float) -> None:
        self.rate, self.test = rate, sequences(2048, CHUNKS, 0.0, torch.Generator().manual_seed(1_000_003))

    def batches(self, seed: int) -> Batches:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(STEPS):
            yield sequences(BATCH, CHUNKS, 0.0, generator)

    @staticmethod
    def loss(said: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(said.squeeze(-1), y)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        return self.loss(model.eval()(self.test[0]), self.test[1]).item()


def step(model: nn.Module, task: Pictures | Polynomials, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor):
    optimiser.zero_grad()
    task.loss(model(x), y).backward()
    optimiser.step()


def train(model: nn.Module, task: Pictures | Polynomials, seed: int) -> None:
    optimiser = torch.optim.Adam(model.train().parameters(), task.rate)
    for x, y in task.batches(seed):
        step(model, task, optimiser, x, y)


@torch.no_grad()
def without(model: nn.Module, what: Literal["composed", "conditions"]) -> nn.Module:
    """A copy with the composed part switched off, or with one program for all inputs."""
    model = copy.deepcopy(model)
    for _, layer in conditional_layers(model):
        if isinstance(layer, ProgramLayer):
            (layer.memory.right if what == "composed" else layer.controller.weight).zero_()
    return model


@torch.no_grad()
def shares(model: nn.Module, x: Tensor) -> dict[str, float]:
    """The composed part's share of the variance of each layer's output."""
    found: dict[str, float] = {}

    def variance(y: Tensor) -> float:
        features = y.movedim(1, -1) if y.dim() == 4 else y
        return features.flatten(0, -2).var(0).sum().item()

    def look(name: str) -> Callable:
        def hook(layer: Any, given: tuple, y: Tensor) -> None:
            layer = copy.deepcopy(layer)
            layer._forward_hooks.clear()
            layer.memory.right.zero_()
            found[name] = variance(y - layer(*given)) / variance(y)

        return hook

    hooks = [layer.register_forward_hook(look(name)) for name, layer in conditional_layers(model)]
    model.eval()(x)
    for hook in hooks:
        hook.remove()
    return found


def ratio(name: str, task: Pictures | Polynomials, rounds: int) -> float:
    """Time of a step over that of the plain network."""
    torch.manual_seed(0)
    plain = NETWORKS[name]()
    recoded = copy.deepcopy(plain)
    nc.recode(recoded, "*")
    (x, y), times = next(task.batches(0)), ([], [])
    models = [(m.train(), torch.optim.Adam(m.parameters(), task.rate)) for m in (plain, recoded)]
    for _ in range(rounds + 3):
        for (model, optimiser), into in zip(models, times, strict=True):
            begun = time.perf_counter()
            step(model, task, optimiser, x, y)
            into.append(time.perf_counter() - begun)
    plain_time, recoded_time = (torch.tensor(t[3:]).median().item() for t in times)
    return recoded_time / plain_time


def measure(name: str, task: Pictures | Polynomials, seeds: int, rounds: int) -> dict[str, Any]:
    scores: dict[str, list[float]] = {"plain": [], "recoded": [], "off": [], "held": []}
    share: list[dict[str, float]] = []
    recoded: nn.Module = nn.Identity()
    for seed in range(seeds):
        torch.manual_seed(seed)
        plain = NETWORKS[name]()
        recoded = copy.deepcopy(plain)
        nc.recode(recoded, "*")
        for model in (plain, recoded):
            train(model, task, seed)
        off, held = without(recoded, "composed"), without(recoded, "conditions")
        for kind, model in zip(scores, (plain, recoded, off, held), strict=True):
            scores[kind].append(task.score(model))
        share.append(shares(recoded, task.test[0][:300]))
    slots = {key: layer.slots for key, layer in conditional_layers(recoded)}
    size = nc.sizes(recoded).total
    row: dict[str, Any] = {"network": name, "n": seeds, "parameters": size.parameters, "plain parameters": size.plain}
    for kind, values in scores.items():
        row[kind] = {
            "mean": torch.tensor(values).mean().item(),
            "std": torch.tensor(values).std().item(),
            "all": values,
        }
    row["share"] = {key: sum(one[key] for one in share) / seeds for key in slots}
    return row | {"slots": slots, "rate": task.rate, "step": ratio(name, task, rounds)}


def main(
    seeds: int = 10,
    only: Name | None = None,
    rate: float = 0.01,
    rounds: int = 31,
    out: Path | None = None,
) -> None:
    """Measure the three networks.

    Args:
        seeds: pairs of networks.
        only: one network instead of all.
        rate: of Adam, for the GRU.
        rounds: of the timing; the figure is a ratio of medians.
        out: also write the figures to this JSON file; the rows of networks left out stay in it.
    """
    torch.set_num_threads(1)
    rows, pictures = [], None
    for name in [only] if only else NETWORKS:
        if name != "gru":
            pictures = pictures or Pictures()
        row = measure(name, Polynomials(rate) if name == "gru" else pictures, seeds, rounds)
        rows.append(row | {"environment": source()})
        told = ", ".join(f"{kind} {row[kind]['mean']:.4g} ± {row[kind]['std']:.2g}" for kind in ("plain", "recoded"))
        told += f", off {row['off']['mean']:.4g}, held {row['held']['mean']:.4g}"
        told += f"; {row['parameters'] / row['plain parameters']:.3f} times the parameters, step {row['step']:.2f}"
        print(f"{name}: {told}; share {', '.join(f'{k} {v:.3f}' for k, v in row['share'].items())}", flush=True)
    if out is not None:
        kept = json.loads(out.read_text())["rows"] if out.is_file() else []
        found = {row["network"]: row for row in (*kept, *rows)}
        out.write_text(json.dumps({"rows": [found[name] for name in NETWORKS if name in found]}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
