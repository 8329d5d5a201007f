"""What the laboratory's engine costs, and what a second worker brings.

    python benchmarks/engine.py

Overhead: time of a polynomial run over that of a bare loop with the same model, data, optimiser and evaluations; the
two take turns. Throughput: eight short runs on one worker and
on two. Writes benchmarks/results/engine.json.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F

import neurocoder as nc
from neurocoder_lab.experiments import polynomial
from neurocoder_lab.experiments.polynomial import EXPERIMENT, Polynomial
from neurocoder_lab.run import execute, source
from neurocoder_lab.store import write_json
from neurocoder_lab.sweep import sweep

STEPS, TURNS = 150, 5


def bare(config: Polynomial) -> float:
    """Seconds of the loop a user would write by hand."""
    torch.manual_seed(config.seed)
    model = polynomial.build(config.model)
    optimiser = torch.optim.Adam(model.parameters(), lr=config.rate)
    held_out = polynomial.sequences(polynomial.VALIDATION, polynomial.CHUNKS, 0.0)
    start = time.perf_counter()
    for step in range(STEPS):
        x, y = polynomial.sequences(polynomial.BATCH, polynomial.CHUNKS, 0.0)
        loss = F.mse_loss(model(x).squeeze(-1), y) + polynomial.ORTHOGONAL * nc.orthogonality(model)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (step + 1) % (STEPS // 50) == 0:
            with torch.no_grad():
                F.mse_loss(model(held_out[0]).squeeze(-1), held_out[1]).item()
    with torch.no_grad():
        x, y = polynomial.sequences(polynomial.TEST, polynomial.CHUNKS, 0.0)
        F.mse_loss(model(x).squeeze(-1), y).item()
        polynomial.attention_changes(model, x, polynomial.CHUNKS)
    return time.perf_counter() - start


def overhead() -> dict[str, float]:
    config = EXPERIMENT.resolve(Polynomial(model="neurocoder-single", iterations=STEPS))
    times: dict[str, list[float]] = {"engine": [], "bare": []}
    for _ in range(TURNS):
        folder = Path(tempfile.mkdtemp())
        times["engine"].append(execute(EXPERIMENT, config, folder, quiet=True)["seconds"])
        shutil.rmtree(folder)
        times["bare"].append(bare(config))
    return {
        "seconds": round(median(times["bare"]), 2),
        "ratio": round(median(times["engine"]) / median(times["bare"]), 3),
    }


def throughput() -> dict[str, float]:
    configs = [Polynomial(model="film", iterations=100, seed=seed) for seed in range(8)]
    seconds = []
    for workers in (1, 2):
        folder = Path(tempfile.mkdtemp())
        start = time.perf_counter()
        assert all(outcome.error is None for outcome in sweep(EXPERIMENT, configs, folder, workers=workers))
        seconds.append(time.perf_counter() - start)
        shutil.rmtree(folder)
    return {"one worker": round(seconds[0], 1), "two": round(seconds[1], 1), "ratio": round(seconds[0] / seconds[1], 2)}


def main() -> None:
    torch.set_num_threads(1)
    found = {}
    for name, part in (("overhead", overhead), ("throughput of 8 runs", throughput)):
        found[name] = part()
        print(name, found[name], flush=True)
    write_json(Path(__file__).parent / "results" / "engine.json", {"about": source(), "measured": found})


if __name__ == "__main__":
    main()
