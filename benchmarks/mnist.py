"""What a layer learns with the library's defaults: MNIST through a fixed random projection to 200 dimensions.

    NEUROCODER_DATA=... python benchmarks/mnist.py [--seeds 3] [--epochs 4] [--option sharpness=10 ...]
    NEUROCODER_DATA=... python benchmarks/mnist.py --only J=1,H=15 --option controller_sees=read [--option slots=100]

The layer is the whole classifier: 200 -> 10, slots 30, 15 components, Adam, batch 128. Prints test error after the last
epoch; nothing is chosen on the test set. Beside it a linear classifier on all 784 pixels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import neurocoder as nc

SETTINGS = {"J=1,H=15": {"steps": 1, "heads": 15}, "J=5,H=3": {"steps": 5, "heads": 3}}


def mnist(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels in [0, 1] (n, 784) and labels, from $NEUROCODER_DATA/mnist or, without it, the hub."""
    from datasets import load_dataset

    root = os.environ.get("NEUROCODER_DATA")
    if root:
        data = load_dataset("parquet", data_files=str(Path(root) / "mnist" / f"{split}.parquet"), split="train")
    else:
        data = load_dataset("ylecun/mnist", split=split)
    columns = data.with_format("torch")[:]  # type: dict[str, torch.Tensor]
    return columns["image"].float().flatten(1) / 255, columns["label"]


def run(model: nn.Module, train, test, epochs: int, seed: int, lr: float) -> float:
    """Test error in percent after training with Adam."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr)
    (x, y), (x_test, y_test) = train, test
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(128):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        return 100 * (model(x_test).argmax(1) != y_test).float().mean().item()


def value_of(text: str) -> Any:
    """A number or truth value as in JSON; anything else is a word."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--only", choices=[*SETTINGS, "linear"], help="one setting instead of all")
    parser.add_argument("--option", action="append", default=[], help="constructor option as name=value")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = dict(option.split("=", 1) for option in args.option)
    options = {name: value_of(text) for name, text in options.items()}
    train, test = mnist("train"), mnist("test")
    projection = torch.randn(784, 200, generator=torch.Generator().manual_seed(0)) / 784**0.5
    mean, std = train[0].mean(), train[0].std()
    small = [((x - mean) / std @ projection, y) for x, y in (train, test)]
    for name in [args.only] if args.only else ["linear", *SETTINGS]:
        errors, size, start = [], 0, time.perf_counter()
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            if name == "linear":
                layer, data = nn.Linear(784, 10), (train, test)
            else:
                layer = nc.Linear(200, 10, **{"slots": 30, "least_used": 5} | SETTINGS[name] | options)
                data = small
            errors.append(run(layer, *data, args.epochs, seed, args.lr))
            size = sum(p.numel() for p in layer.parameters())
        error = torch.tensor(errors)
        spread = f" ± {error.std():.2f}" if len(errors) > 1 else ""
        print(
            f"{name:10} {options or ''} {size:,} parameters, test error {error.mean():.2f}%{spread} (n={len(errors)}: "
            f"{', '.join(f'{e:.2f}' for e in errors)}), {(time.perf_counter() - start) / len(errors):.0f} s a run"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
