"""What a layer costs by the number of its slots: a step and its peak memory over a dense layer's.

    neurocoder bench slots [--repeats 31] [--slots 30 1000 10000 100000] [--out FILE]

One thread, 1024 inputs and outputs, a batch of 128, 8 heads that read 2 slots each. A step is forward and backward, as
in `neurocoder bench`; once as in a loop that trains the layer, once after a step of another layer, which leaves the
caches full of its own numbers: who touches many rows pays more for that. PEER is that of the package PEER-pytorch, with
as many experts, heads and reads: once by itself, its keys halves of half the width and its gradients dense, and once
with keys as short and gradients as sparse as ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from torch import nn

import neurocoder as nc
from neurocoder_lab.bench import BATCH, interleave, peak_bytes, publish, ratios, stepper, table
from neurocoder_lab.errors import LabError
from neurocoder_lab.networks import Peer

WIDTH, HEADS, READS = 1024, 8, 2
HALF = 4  # of a product key
UNSEEN = 4  # steps of a layer in a row before one that counts
EVERY = 3000  # slots up to which all are read as well
SEARCHED = 30_000  # and up to which each has a key of its own
SPARSE: dict[str, Any] = {"heads": HEADS, "top_k": READS, "one_choice": True, "sparse": True}


def contestants(slots: int) -> Iterator[tuple[str, nn.Module]]:
    """The layers of so many slots: with product keys, of the square below."""
    yield "low rank, 16", nc.peers.LowRank(WIDTH, WIDTH, rank=HEADS * READS)
    square = isqrt(slots) ** 2
    if slots <= EVERY:
        yield "all slots", nc.Linear(WIDTH, WIDTH, slots=slots, heads=HEADS)
    if slots <= SEARCHED:
        yield "2 slots a head", nc.Linear(WIDTH, WIDTH, slots=slots, **SPARSE)
        yield "2 slots a head, fixed", nc.Linear(WIDTH, WIDTH, slots=slots, addresses="fixed", **SPARSE)
    yield "product keys", nc.Linear(WIDTH, WIDTH, slots=square, key_dim=2 * HALF, product_keys=True, **SPARSE)
    yield "PEER", Peer(WIDTH, square, HEADS, READS)
    yield "PEER, as ours", Peer(WIDTH, square, HEADS, READS, key_dim=HALF, sparse=True)


def measure(slots: tuple[int, ...], repeats: int, out: Path | None) -> None:
    """Print every ratio, and write them where `out` says."""
    if repeats < 1 or not slots or min(slots) < 4:
        raise LabError(f"repeats must be at least 1, slots at least 4; got --repeats {repeats} --slots {slots}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"Step time and peak memory over nn.Linear's, {WIDTH}x{WIDTH}, batch {BATCH}, {HEADS} heads, one thread")
    x, dense = torch.randn(BATCH, WIDTH, requires_grad=True), nn.Linear(WIDTH, WIDTH)
    rows: dict[str, dict[str, float]] = {}
    for count in slots:
        layers = dict(contestants(count))
        steps = {"dense": stepper(dense, x)} | {name: stepper(layer, x) for name, layer in layers.items()}
        figures = {f"{count:,} slots, step": ratios(interleave(steps, repeats, unseen=UNSEEN))}
        figures[f"{count:,} slots, step after another layer's"] = ratios(interleave(steps, repeats))
        held = {name: peak_bytes(layer, x) for name, layer in {"dense": dense, **layers}.items()}
        base = held.pop("dense")
        memory = {"dense MB": round(base / 2**20, 1)} | {name: round(size / base, 3) for name, size in held.items()}
        figures[f"{count:,} slots, peak memory"] = memory
        print(table(figures), flush=True)
        rows |= figures
    publish(rows, repeats, out)
