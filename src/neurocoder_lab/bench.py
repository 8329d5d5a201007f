"""Speed and memory of the layers, and of their peers, against the dense layers they replace, as ratios.

    neurocoder bench [--repeats 31] [--widths 512 1024 2048 4096] [--compiled] [--out FILE]

One thread. A round times every contestant once, forward and backward (inference: forward, without gradients), one after
the other; the figure is the median of its times divided by the median of the dense layer's times in the same rounds.
Peak memory is what PyTorch's allocator holds at most during a step (forward, backward, gradients), parameters included.
"""

from __future__ import annotations

import copy
import gc
import platform
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments import algorithms
from neurocoder_lab.provenance import processor, source
from neurocoder_lab.store import make_folder, write_json

BATCH = 128
WARM = 2  # rounds that are not counted
SETTINGS: dict[str, dict[str, Any]] = {
    "J=5,H=3": {"steps": 5, "heads": 3},
    "J=1,H=15": {"heads": 15},
    "J=5,H=3 + R": {"steps": 5, "heads": 3, "residual": True},
    "J=1,H=15 + R": {"heads": 15, "residual": True},
    "J=5,H=3, reading": {"steps": 5, "heads": 3, "controller_sees": "read"},
    "J=1,H=15, reading": {"heads": 15, "controller_sees": "read"},
}
OPTIONS = {"slots": 30, "key_dim": 5, "least_used": 5}


def stepper(module: nn.Module, x: Tensor, run: Callable | None = None) -> Callable[[], float]:
    """A function that times one forward and backward; gradients are dropped outside of the timed part."""
    run = module if run is None else run
    with torch.no_grad():
        output = run(x)
        d_output = torch.randn_like(output[0] if isinstance(output, tuple) else output)

    def step() -> float:
        module.zero_grad(set_to_none=True)
        x.grad = None
        start = time.perf_counter()
        y = run(x)
        (y[0] if isinstance(y, tuple) else y).backward(d_output)
        return time.perf_counter() - start

    return step


def interleave(contestants: dict[str, Callable[[], float]], repeats: int, unseen: int = 0) -> dict[str, float]:
    """Median milliseconds of each, all taking turns in an order drawn anew each round; the first two rounds warm up.

    In a fixed order whoever follows a large one finds the cache full of its weights every time. With `unseen` steps
    before the one that counts in each turn, everyone finds its own there, as in a loop that trains it alone.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    named = [*contestants.items()]
    gc.disable()
    for turn in range(repeats + WARM):
        for name, step in (named[place] for place in torch.randperm(len(named))):
            for _ in range(unseen):
                step()
            seconds = step()
            if turn >= WARM:
                times[name].append(1e3 * seconds)
    gc.enable()
    return {name: median(values) for name, values in times.items()}


def peak_bytes(module: nn.Module, x: Tensor) -> int:
    """Most bytes allocated at once during one step, counting the parameters."""
    step = stepper(module, x)
    step()
    module.zero_grad(set_to_none=True)
    x.grad = None
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    held = peak = 0
    assert profile.profiler is not None
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, held)
    return peak + sum(p.numel() * p.element_size() for p in module.parameters()) + x.numel() * x.element_size()


def linear_layers(widths: list[int], repeats: int, compiled: bool) -> dict[str, dict[str, float]]:
    rows = {}
    for width in widths:
        x = torch.randn(BATCH, width, requires_grad=True)
        modules: dict[str, nn.Module] = {"dense": nn.Linear(width, width)}
        modules |= {name: nc.Linear(width, width, **OPTIONS, **options) for name, options in SETTINGS.items()}
        steps = {name: stepper(module, x) for name, module in modules.items()}
        if compiled:
            steps |= {f"{name} compiled": stepper(modules[name], x, torch.compile(modules[name])) for name in SETTINGS}
        times = interleave(steps, repeats)
        rows[f"Linear {width}x{width}"] = ratios(times)
    return rows


def convolutions(repeats: int) -> dict[str, dict[str, float]]:
    rows = {}
    for channels, size in ((64, 16), (256, 8)):
        x = torch.randn(32, channels, size, size, requires_grad=True)
        steps = {"dense": stepper(nn.Conv2d(channels, channels, 3, padding=1), x)}
        for name, options in SETTINGS.items():
            steps[name] = stepper(nc.Conv2d(channels, channels, 3, padding=1, **OPTIONS, **options), x)
        rows[f"Conv2d {channels}, 3x3, {size}x{size} images"] = ratios(interleave(steps, repeats))
    return rows


def polynomial_head(repeats: int) -> dict[str, dict[str, float]]:
    """The head of the polynomial experiment against a GRU of its main network's size over the same sequences."""
    gru = nn.GRU(2, 32, batch_first=True)
    head = nc.Linear(8, 1, slots=20, steps=5, key_dim=3, least_used=2)
    times = interleave(
        {
            "dense": stepper(gru, torch.randn(128, 40, 2, requires_grad=True)),
            "J=5,H=1": stepper(head, torch.randn(5120, 8, requires_grad=True)),
        },
        repeats,
    )
    return {"polynomial head 8x1, 5,120 rows, over nn.GRU(2, 32)": ratios(times)}


def turing(repeats: int, steps: int = 20, rows: int = algorithms.BATCH) -> dict[str, dict[str, float]]:
    """A time step of the Neural Turing Machine, plain and with each method in its interface, over an LSTM cell's."""
    cell = nn.LSTMCell(30, 200)

    def unrolled(x: Tensor) -> Tensor:
        state, hidden = None, []
        for step in x.unbind(1):
            state = cell(step, state)
            hidden.append(state[0])
        return torch.stack(hidden)

    contestants = {"dense": stepper(cell, torch.randn(rows, steps, 30), unrolled)}
    for model in algorithms.MODELS:
        x = torch.randn(rows, steps, algorithms.WIDTH)
        contestants[algorithms.NAMES[model]] = stepper(algorithms.build(model, hidden=200), x)
    times = interleave(contestants, repeats)
    what = f"NTM, LSTM 200, memory 128x20, {rows} rows"
    return {
        f"time steps a second, {what}": {name: round(1e3 * steps / time) for name, time in times.items()},
        f"{what}, over nn.LSTMCell(30, 200)": ratios(times),
    }


def peers(repeats: int, width: int = 1024, rows: int = 1024) -> dict[str, dict[str, float]]:
    """The other layers: those that send rows to parts on many rows, those that mix on a small batch."""
    many, few = torch.randn(rows, width, requires_grad=True), torch.randn(BATCH, width, requires_grad=True)
    routed = {
        "MoE, 1 of 10": nc.peers.MixtureOfExperts(width, width, experts=10),
        "MoE, 2 of 10": nc.peers.MixtureOfExperts(width, width, experts=10, top_k=2),
        "MoE, 1 of 10, dense": nc.peers.MixtureOfExperts(width, width, experts=10, dispatch="dense"),
        "modular, 1 of 15": nc.modular.Linear(width, width, modules=15),
    }
    mixed = {
        "NSM, 10 programs": nc.peers.StoredProgramMemory(width, width, programs=10),
        "HyperNet": nc.peers.HyperLinear(width, width),
        "HyperNet, 64 hidden": nc.peers.HyperLinear(width, width, layers=2),
        "FiLM": nc.peers.FiLM(width, width),
        "FiLM, 64 hidden": nc.peers.FiLM(width, width, layers=2),
        "low rank, 30": nc.peers.LowRank(width, width, rank=30),
    }
    figures = {}
    for x, modules in ((many, routed), (few, mixed)):
        steps = {"dense": stepper(nn.Linear(width, width), x)}
        steps |= {name: stepper(module, x) for name, module in modules.items()}
        with warnings.catch_warnings(action="ignore"):  # that a modular layer has none of its trainings: only timed
            figures[f"peers, {width}x{width}, {len(x)} rows"] = ratios(interleave(steps, repeats))
    wide = peak_bytes(nn.Linear(width, 10 * width), few)
    used = peak_bytes(mixed["NSM, 10 programs"], few)
    figures["peak memory of NSM, 10 programs, over a dense layer of 10 times the outputs"] = {
        "dense MB": round(wide / 2**20, 1),
        "ratio": round(used / wide, 3),
    }
    return figures


def inference(repeats: int) -> dict[str, dict[str, float]]:
    """Latency of a small layer on few rows, where the number of operations counts; with `nc.cached`, too."""
    figures = {}
    for rows in (1, 16, 64):
        x, stack = torch.randn(rows, 512), ExitStack()
        modules: dict[str, nn.Module] = {"dense": nn.Linear(512, 18)}
        for name in ("J=1,H=15", "J=1,H=15, reading"):
            modules |= {name: nc.Linear(512, 18, **OPTIONS, **SETTINGS[name])}
            modules |= {f"{name}, cached": copy.deepcopy(modules[name])}
            stack.enter_context(nc.cached(modules[f"{name}, cached"]))
        with stack, torch.no_grad():
            times = interleave({name: caller(module, x) for name, module in modules.items()}, 20 * repeats)
        figures[f"inference, Linear 512x18, {rows} rows"] = ratios(times)
    return figures


def caller(module: nn.Module, x: Tensor) -> Callable[[], float]:
    """A function that times one call."""

    def call() -> float:
        start = time.perf_counter()
        module(x)
        return time.perf_counter() - start

    return call


def ratios(times: dict[str, float]) -> dict[str, float]:
    dense = times.pop("dense")
    return {"dense ms": round(dense, 3)} | {name: round(value / dense, 3) for name, value in times.items()}


def memory(width: int) -> dict[str, dict[str, float]]:
    x = torch.randn(BATCH, width, requires_grad=True)
    dense = peak_bytes(nn.Linear(width, width), x)
    row = {"dense MB": round(dense / 2**20, 1)}
    for name, options in SETTINGS.items():
        row[name] = round(peak_bytes(nc.Linear(width, width, **OPTIONS, **options), x) / dense, 3)
    return {f"peak memory, Linear {width}x{width}": row}


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = []
    for name, row in rows.items():
        cells = "   ".join(f"{column} {value:g}" for column, value in row.items())
        lines.append(f"{name:52} {cells}")
    return "\n".join(lines)


def measure(repeats: int, widths: list[int], compiled: bool, out: Path | None) -> None:
    """Print every ratio, and write them where `out` says."""
    if repeats < 1 or not widths or min(widths) < 1:
        raise LabError(
            f"repeats and widths must be at least 1, got --repeats {repeats} --widths {' '.join(map(str, widths))}"
        )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"Step time over the dense layer's, batch {BATCH}, slots 30, key_dim 5, least_used 5, one thread")
    rows: dict[str, dict[str, float]] = {}
    for part in (
        lambda: linear_layers(widths, repeats, compiled),
        lambda: convolutions(repeats),
        lambda: polynomial_head(repeats),
        lambda: turing(repeats),
        lambda: inference(repeats),
        lambda: memory(2048),
        lambda: peers(repeats),
    ):
        figures = part()
        rows |= figures
        print(table(figures), flush=True)
    publish(rows, repeats, out)


def publish(rows: dict[str, dict[str, float]], repeats: int, out: Path | None) -> None:
    """Write the ratios, and what made them, where `out` says."""
    if out is not None:
        record(out, rows, batch=BATCH, repeats=repeats)


def record(out: Path, rows: dict[str, dict[str, float]], **how: int) -> None:
    """Write figures, and what they were measured with."""
    about = source() | {"torch": torch.__version__, "python": platform.python_version(), "threads": 1}
    make_folder(out.parent)
    about |= {"machine": platform.machine(), "processor": processor()}
    write_json(out, {"about": about | how, "ratios": rows})
