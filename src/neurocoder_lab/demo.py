"""`make demo`: re-code one layer of a network, train it beside its plain twin, and see what it did.

    python -m neurocoder_lab.demo

The data ship with the code: 1,797 handwritten digits of 8x8 pixels (UCI, CC BY 4.0), 1,297 to train on, 500 to test.
As in the paper's MNIST experiment, the network is one linear classifier that sees a fixed random projection of the
pixels, here to 16 numbers: what it can tell apart depends on how it computes with them. A plain network of the size of
the re-coded layer stands beside it.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from importlib.resources import files

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc

INPUTS, EPOCHS, BATCH, SEEDS, TEST = 16, 60, 64, 3, 500
NETWORKS: dict[str, dict | None] = {
    "one linear layer": None,
    "the same, re-coded: slots=10, heads=6": {"slots": 10, "heads": 6},
    "the same, re-coded: slots=10, steps=3, heads=2": {"slots": 10, "heads": 2, "steps": 3, "least_used": 3},
    "a plain hidden layer of 72 units instead": None,
}


def digits() -> tuple[Tensor, Tensor]:
    """A fixed random projection of the pixels (1797, 16) and the labels."""
    data = load(files("neurocoder_lab").joinpath("digits.safetensors").read_bytes())
    projection = torch.randn(64, INPUTS, generator=torch.Generator().manual_seed(0))
    return data["images"].float() @ projection, data["labels"].long()


def network(name: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    if "hidden" in name:
        return nn.Sequential(nn.Linear(INPUTS, 72), nn.ReLU(), nn.Linear(72, 10))
    model, options = nn.Sequential(nn.Linear(INPUTS, 10)), NETWORKS[name]
    if options is not None:
        nc.recode(model, "0", **options)
    return model


def train(model: nn.Module, x: Tensor, y: Tensor, seed: int, tick) -> float:
    """Seconds that training took."""
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    generator, start = torch.Generator().manual_seed(seed), time.perf_counter()
    loss = torch.zeros(())
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        tick(loss.item())
    return time.perf_counter() - start


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    console = Console()
    x, y = digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, rest = order[:TEST], order[TEST:]
    x = (x - x[rest].mean(0)) / x[rest].std(0)

    console.print(
        f"Handwritten digits, seen through a fixed random projection to {INPUTS} numbers, {SEEDS} seeds each."
    )
    table = Table()
    for column in ("network", "parameters", "test error (± std)", "seconds a run"):
        table.add_column(column, justify="left" if column == "network" else "right")
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip

    def advance(task: TaskID, loss: float) -> None:
        bar.update(task, advance=1, loss=loss)

    found = None
    with bar:
        for name in NETWORKS:
            task = bar.add_task(f"{name:46}", total=EPOCHS * SEEDS, loss=float("nan"))
            errors, seconds, size = [], 0.0, 0
            for seed in range(SEEDS):
                model = network(name, seed)
                size = sum(p.numel() for p in model.parameters())
                seconds += train(model, x[rest], y[rest], seed, partial(advance, task))
                with torch.no_grad():
                    errors.append(100 * (model(x[test]).argmax(1) != y[test]).float().mean())
                if NETWORKS[name] is not None and found is None:
                    found = nc.diagnose(model, x[test])["0"]
            error = torch.stack(errors)
            table.add_row(name, f"{size:,}", f"{error.mean():.1f}% ± {error.std():.1f}", f"{seconds / SEEDS:.1f}")
    console.print(table)
    console.print(f"How the first re-coded layer used its memory on the test images: {found}")
    console.print("\nIn your own network:  nc.recode(model, 'classifier.*', slots=30, heads=15)", soft_wrap=True)


if __name__ == "__main__":
    main()
