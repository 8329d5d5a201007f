"""The toy regression of Modular Networks (section 3.1, appendix B): 2 modules, 1 chosen, 3 ways of training.

    python benchmarks/toy_regression.py [--seeds 10] [--workers 2]

Inputs come from two Gaussians in the plane; one is rotated, the other scaled, by random factors. The paper gives no
means: +-(3, 3) with standard deviation 0.7 keeps the two apart, +-(1, 1) lets them overlap. Loss is the squared error
on 2,000 held-out points divided by the variance of the targets, with the most likely module. 1,000 training points,
batch 128, Adam 0.01, 7,500 steps; EM samples 10 paths and takes 15 steps between E-steps; likelihood variance 0.05.
Writes benchmarks/results/toy_regression.json.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import cos, pi, sin
from pathlib import Path

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder.modular import training

POINTS, HELD_OUT, BATCH, STEPS, M_STEPS = 1000, 2000, 128, 7500, 15
MEANS = {"separate": 3.0, "overlapping": 1.0}
METHODS = ("em", "reinforce", "noisy top-k")


def problem(seed: int, mean: float) -> tuple[Tensor, Tensor]:
    """Inputs and targets (Eq. 17), training points first."""
    generator = torch.Generator().manual_seed(seed)
    angle = 2 * pi * torch.rand((), generator=generator).item()
    rotation = torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]])
    scaling = torch.randn(2, generator=generator)
    first = torch.randint(2, (POINTS + HELD_OUT, 1), generator=generator).bool()
    x = torch.where(first, mean, -mean) + 0.7 * torch.randn(POINTS + HELD_OUT, 2, generator=generator)
    return x, torch.where(first, x @ rotation.t(), x * scaling)


def run(method: str, setting: str, seed: int) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, y = problem(seed, MEANS[setting])
    model = nn.Sequential(nc.modular.Linear(2, 2, bias=False, modules=2))
    likelihood = training.gaussian(0.05)
    if method == "em":
        trainer = training.ViterbiEM(model, likelihood, POINTS)
    elif method == "reinforce":
        trainer = training.Reinforce(model, likelihood)
    else:
        trainer = training.NoisyTopK(model, likelihood, mixed=2)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        if isinstance(trainer, training.ViterbiEM) and step % M_STEPS == 0:
            index = torch.randint(POINTS, (BATCH,))
            trainer.expect(x[index], y[index], index)
        index = torch.randint(POINTS, (BATCH,))
        optimiser.zero_grad()
        trainer.loss(x[index], y[index], index).backward()
        optimiser.step()
    x, y = x[POINTS:], y[POINTS:]
    with torch.no_grad(), nc.trace(model) as seen:
        loss = (model(x) - y).square().mean() / y.var(0).mean()
    h_a, h_b = training.entropies(seen)
    solved = loss.item() < 1e-3 and h_a < 0.05 and h_b > 0.65
    return {
        "method": method,
        "setting": setting,
        "seed": seed,
        "loss": loss.item(),
        "H_a": h_a,
        "H_b": h_b,
        "solved": solved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    grid = [*product(METHODS, MEANS, range(args.seeds))]
    rows = []
    with ProcessPoolExecutor(args.workers) as pool:
        for row in pool.map(run, *zip(*grid, strict=True)):
            rows.append(row)
            print("{method:12} {setting:12} seed {seed}: loss {loss:.2g}, H_a {H_a:.3f}, H_b {H_b:.3f}".format(**row))
    for method, setting in product(METHODS, MEANS):
        mine = [row for row in rows if (row["method"], row["setting"]) == (method, setting)]
        print(f"{method}, {setting}: solved {sum(row['solved'] for row in mine)} of {len(mine)}")
    file = Path(__file__).parent / "results" / "toy_regression.json"
    file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
