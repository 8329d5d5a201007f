"""A step of `nc.SparseAdam` over that of `torch.optim.SparseAdam`, on tables of which a step moves some rows.

    python benchmarks/sparse_adam.py [--repeats 101] [--out benchmarks/results/sparse_adam.json]

One thread; gradients as autograd leaves them, rows in order.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab.bench import interleave, record, table

TABLES = ((65_536, 1, 15_000), (65_536, 2, 15_000), (65_536, 10, 15_000), (100_000, 1024, 2000))  # rows, width, moved


@dataclass
class Args:
    repeats: int = 101
    """Steps of each."""
    out: Path | None = None
    """Where to write the ratios."""


def stepper(kind: type[torch.optim.SparseAdam], start: Tensor, gradient: Tensor) -> Callable[[], float]:
    """A function that times one step."""
    weight = nn.Parameter(start.clone())
    optimiser = kind([weight])

    def step() -> float:
        parts = gradient._indices(), gradient._values(), gradient.shape
        weight.grad = torch.sparse_coo_tensor(*parts, check_invariants=False)  # not coalesced: autograd forgets it
        begun = time.perf_counter()
        optimiser.step()
        return time.perf_counter() - begun

    return step


def measure(args: Args) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: dict[str, dict[str, float]] = {}
    for count, width, moved in TABLES:
        at, start = torch.randperm(count)[:moved].sort().values, torch.randn(count, width)
        gradient = torch.sparse_coo_tensor(at[None], torch.randn(moved, width), start.shape, check_invariants=False)
        kinds = {"PyTorch's": torch.optim.SparseAdam, "ours": nc.SparseAdam}
        taken = interleave({name: stepper(kind, start, gradient) for name, kind in kinds.items()}, args.repeats)
        ratio = {"PyTorch's, ms": round(taken["PyTorch's"], 3), "ours": round(taken["ours"] / taken["PyTorch's"], 3)}
        rows[f"{moved:,} of {count:,} rows of {width}"] = ratio
    print(table(rows))
    if args.out is not None:
        record(args.out, rows, repeats=args.repeats)


if __name__ == "__main__":
    measure(tyro.cli(Args))
