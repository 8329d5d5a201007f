"""`make demo`: re-code one layer of a network, train it beside its plain twin, and see what it did.

    python -m neurocoder_lab.demo

The data ship with the code: 1,797 handwritten digits of 8x8 pixels (UCI, CC BY 4.0), 1,297 to train on, 500 to test.
As in the paper's MNIST experiment, the network is one linear classifier that sees a fixed random projection of the
pixels, here to 16 numbers: what it can tell apart depends on how it computes with them.
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
RECODED = {
    "J=1, H=6": {"slots": 10, "heads": 6},
    "J=3, H=2": {"slots": 10, "heads": 2, "steps": 3, "least_used": 3},
}


def digits() -> tuple[Tensor, Tensor]:
    """A fixed random projection of the pixels (1797, 16), standardised, and the labels."""
    data = load(files("neurocoder_lab").joinpath("digits.safetensors").read_bytes())
    projection = torch.randn(64, INPUTS, generator=torch.Generator().manual_seed(0))
    x = data["images"].float() @ projection
    return (x - x.mean(0)) / x.std(0), data["labels"].long()


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 10))


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

    table = Table(title=f"A linear classifier of handwritten digits, {SEEDS} seeds")
    for column in ("network", "parameters", "test error", "seconds a run"):
        table.add_column(column, justify="left" if column == "network" else "right")
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip

    def advance(task: TaskID, loss: float) -> None:
        bar.update(task, advance=1, loss=loss)

    model = network(0)
    with bar:
        for name, options in {"plain": None, **RECODED}.items():
            task = bar.add_task(f"{name:10}", total=EPOCHS * SEEDS, loss=float("nan"))
            errors, seconds = [], 0.0
            for seed in range(SEEDS):
                model = network(seed)
                if options is not None:
                    nc.recode(model, "0", **options)
                seconds += train(model, x[rest], y[rest], seed, partial(advance, task))
                with torch.no_grad():
                    errors.append(100 * (model(x[test]).argmax(1) != y[test]).float().mean())
            error = torch.stack(errors)
            size = sum(p.numel() for p in model.parameters())
            title = name if options is None else f"re-coded, {name}"
            table.add_row(title, f"{size:,}", f"{error.mean():.1f}% ± {error.std():.1f}", f"{seconds / SEEDS:.1f}")
    console.print(table)
    found = nc.diagnose(model, x[test])["0"]
    console.print(
        f"The last one composed {found.inputs} programs for the {TEST} test images, of effective rank "
        f"{found.effective_rank:.1f}, from {model[0].slots} slots; {int(found.dead[0])} left slots lie idle."
    )
    console.print("Put it into your own network: nc.recode(model, 'classifier.*', slots=30, steps=5, heads=3)")


if __name__ == "__main__":
    main()
