"""EWC's Fisher over 12,000 samples: closed forms against one backward a sample, side by side, one thread.

    python benchmarks/fisher.py --out benchmarks/results/fisher.json

The model is 1024-400-400-2, plain and re-coded; inputs are random, since time does not depend on them. For re-coded
models one backward a sample is timed on a tenth of them. `error` is the largest difference from one backward a sample,
both in double precision, relative to the largest entry of its parameter; `single` is the largest difference of the
closed form in single precision from that, as it is: there a rounding error turns a unit of a ReLU on or off.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder_lab.continual import fisher
from neurocoder_lab.experiments.split_mnist import LAYERS
from neurocoder_lab.networks import mlp
from neurocoder_lab.run import source


def one_by_one(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """One backward a sample."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in x.split(1):
        logits = model(row)
        model.zero_grad()
        F.cross_entropy(logits, logits.argmax(-1)).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] += p.grad**2 / len(x)
    model.zero_grad()
    return total


def main(samples: int = 12_000, repeats: int = 3, out: Path | None = None) -> None:
    """Time both ways.

    Args:
        samples: how many.
        repeats: rounds; the figure is the median of the closed form's, beside one round of the other.
        out: also write the figures to this JSON file.
    """
    torch.set_num_threads(1)
    rows = []
    for name, options in ({"mlp": None} | LAYERS).items():
        torch.manual_seed(0)
        model: nn.Module = mlp(1024, 400, 400, 2)
        if options:
            nc.recode(model, "*", **options)
        x = torch.randn(samples, 1024)
        fisher(model, x[:100])
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            fisher(model, x)
            times.append(time.perf_counter() - begun)
        fast, some = sorted(times)[repeats // 2], x if options is None else x[: samples // 10]
        begun = time.perf_counter()
        one_by_one(model, some)
        slow = (time.perf_counter() - begun) * len(x) / len(some)
        found = fisher(model, some)
        wanted, exact = one_by_one(model.double(), some.double()), fisher(model, some.double())
        error = max(((exact[n] - wanted[n]).abs().max() / wanted[n].abs().max()).item() for n in wanted)
        single = max((found[n] - wanted[n]).abs().max().item() for n in wanted)
        rows.append({"model": name, "samples": samples, "seconds": round(fast, 3), "one by one": round(slow, 3),
                     "ratio": round(slow / fast, 1), "error": error, "single": single})  # fmt: skip
        speed = f"{fast:7.2f} s, one by one {slow:7.2f} s: {slow / fast:5.1f} times faster"
        print(f"{name:12} {speed}, error {error:.1e}, single {single:.1e}")
    if out is not None:
        out.write_text(json.dumps({"environment": source(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
