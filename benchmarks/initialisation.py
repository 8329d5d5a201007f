"""How a fresh layer starts, over widths, slots, heads, steps, keys, with and without usage and residual.

    python benchmarks/initialisation.py [--seeds 2]

For each setting: output variance over that of a fresh `nn.Linear` on standard normal input, the mean cosine of the
left vectors of one program ("collapse" near 1), and whether every parameter has a finite, non-zero gradient. Prints a
line for each group of settings with the worst of it.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import cast

import torch
from torch import nn

import neurocoder as nc
from neurocoder.diagnosis import ProgramDiagnosis

WIDTHS = ((8, 8), (8, 1), (64, 10), (512, 512), (4096, 4096))
SLOTS = (2, 5, 30, 100)
KEYS = (2, 5, 16)
SHAPES = ((1, 1), (1, 2), (1, 15), (2, 1), (5, 1), (5, 3), (10, 2))  # steps, heads


def measure(width: tuple[int, int], seed: int, **options) -> tuple[float, float, bool]:
    """Variance ratio, similarity of components, and whether all gradients are finite and not zero."""
    torch.manual_seed(seed)
    layer = nc.Linear(*width, **options)
    x = torch.randn(256, width[0])
    y = layer(x)
    (y - torch.randn_like(y)).square().mean().backward()
    grads = [p.grad for p in layer.parameters()]
    healthy = all(g is not None and bool(g.isfinite().all()) and bool(g.any()) for g in grads)
    wanted = torch.stack([nn.Linear(*width)(x).detach().var() for _ in range(8)]).mean()
    return (y.var() / wanted).item(), cast(ProgramDiagnosis, nc.diagnose(layer, x)[""]).similarity, healthy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'steps':>5} {'heads':>5} {'usage':>5} {'R':>3} | variance ratio: worst low, high"
        " | similarity: mean, worst | unhealthy gradients"
    )
    for (steps, heads), usage, residual in product(SHAPES, (False, True), (False, True)):
        if usage and steps == 1:
            continue
        rows = []
        for width, slots, keys, seed in product(WIDTHS, SLOTS, KEYS, range(args.seeds)):
            if width[0] > 1000 and (seed or keys != 5):
                continue
            rows.append(
                measure(
                    width,
                    seed,
                    slots=slots,
                    key_dim=keys,
                    steps=steps,
                    heads=heads,
                    residual=residual,
                    least_used=max(1, slots // 4) if usage else 0,
                )
            )
        ratio, similarity, healthy = (torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True))
        print(
            f"{steps:5} {heads:5} {usage!s:>5} {residual!s:>5} | {ratio.min():5.2f} {ratio.max():5.2f} | "
            f"{similarity.mean():5.2f} {similarity.max():5.2f} | {int((healthy == 0).sum())} of {len(rows)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
