"""`neurocoder bench`: how fast, and how large."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import tyro

from neurocoder_lab.signals import importing


def bench(
    what: tyro.conf.Positional[Literal["layers", "networks", "slots", "atari"]] = "layers",
    repeats: int = 31,
    widths: tuple[int, ...] = (512, 1024, 2048, 4096),
    compiled: bool = False,
    networks: tuple[
        Literal["mlp", "lenet", "densenet", "densenet-output", "polynomial-gru", "ntm", "penn-treebank"], ...
    ] = ("mlp", "lenet", "densenet-output", "polynomial-gru", "ntm"),
    seeds: int = 3,
    slots: tuple[int, ...] = (30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000),
    out: Path | None = None,
) -> None:
    """Speed and size against plain layers, networks or agents, as ratios, and by the number of slots; one thread.

    Args:
        what: layers against nn.Linear, the networks of the papers, large memories that are read in part, or the agents
            that play Atari.
        repeats: rounds; the figure is the median.
        widths: layers: of the square program-memory layers.
        compiled: layers: also torch.compile (takes minutes).
        networks: networks: which of them; densenet, of 100 layers, takes over an hour, penn-treebank five minutes.
        seeds: networks: how often to measure anew.
        slots: slots: how many there are.
        out: also write the ratios to this JSON file; of networks, results/speed.json decides claims.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler that counts bytes prints, too
    with importing():
        from neurocoder_lab import bench, speed, throughput
        from neurocoder_lab import slots as large

    if what == "atari":
        return throughput.measure(repeats, out)
    if what == "networks":
        return speed.measure(networks, repeats, seeds, out)
    if what == "slots":
        return large.measure(slots, repeats, out)
    bench.measure(repeats, [*widths], compiled, out)
