"""`neurocoder bench`: how fast, and how large."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from neurocoder_lab.signals import importing


def bench(
    what: tyro.conf.Positional[Literal["layers", "networks", "atari"]] = "layers",
    repeats: int = 31,
    widths: tuple[int, ...] = (512, 1024, 2048, 4096),
    compiled: bool = False,
    networks: tuple[Literal["mlp", "lenet", "densenet", "polynomial-gru", "ntm"], ...] = (
        "mlp",
        "lenet",
        "polynomial-gru",
        "ntm",
    ),
    seeds: int = 3,
    out: Path | None = None,
) -> None:
    """Speed and size against plain layers, plain networks or plain agents, as ratios; one thread.

    Args:
        what: layers against nn.Linear, the networks of the papers, or the agents that play Atari.
        repeats: rounds; the figure is the median.
        widths: layers: of the square program-memory layers.
        compiled: layers: also torch.compile (takes minutes).
        networks: networks: which of them; densenet, of 100 layers, takes half an hour.
        seeds: networks: how often to measure anew.
        out: also write the ratios to this JSON file; of networks, results/speed.json decides claims.
    """
    with importing():
        from neurocoder_lab import bench, speed, throughput

    if what == "atari":
        return throughput.measure(repeats, out)
    if what == "networks":
        return speed.measure(networks, repeats, seeds, out)
    bench.measure(repeats, [*widths], compiled, out)
