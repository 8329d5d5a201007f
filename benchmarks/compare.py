"""Whether a change made layers slower: the rows of `neurocoder bench` with the code of two checkouts, old and new.

    git worktree add ../before COMMIT
    python benchmarks/compare.py ../before/src src                                # all rows
    python benchmarks/compare.py ../before/src src --rows linear polynomial --widths 512 1024

Each run starts one process for each checkout, one thread each. They take turns step by step, so that whatever else the
machine does meets both alike; while one measures, the other waits. A figure is the median over the runs (`--runs`) of
new over old; `dense` is PyTorch's own layer in both, and so says how far the figures scatter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

Rows = dict[str, dict[str, float]]
PARTS: dict[str, Callable[[Any, argparse.Namespace], Rows]] = {
    "linear": lambda bench, said: bench.linear_layers(said.widths, said.repeats, False),
    "convolution": lambda bench, said: bench.convolutions(said.repeats),
    "polynomial": lambda bench, said: bench.polynomial_head(said.repeats),
    "inference": lambda bench, said: bench.inference(said.repeats),
    "memory": lambda bench, said: bench.memory(2048),
    "peers": lambda bench, said: bench.peers(said.repeats),
}
TURN = "turn"


def measure(said: argparse.Namespace) -> None:
    """What one of the two processes does: the rows, in milliseconds, with every step at its turn."""
    import torch

    from neurocoder_lab import bench

    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured: list[dict[str, float]] = []

    def take_turns(contestants: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(repeats + 2):
            for name, step in contestants.items():
                print(TURN, flush=True)
                input()
                seconds = step()
                if turn >= 2:  # the first two warm up
                    times[name].append(1e3 * seconds)
        measured.append({name: median(values) for name, values in times.items()})
        return dict(measured[-1])

    bench.interleave = take_turns
    rows: Rows = {}
    for part in said.rows:
        for name, row in PARTS[part](bench, said).items():
            rows[name] = measured.pop(0) if "dense ms" in row else row  # memory is counted, not timed
    print(json.dumps(rows), flush=True)


def together(words: list[str], sources: list[Path]) -> list[Rows]:
    """The rows of both checkouts, whose processes take turns."""
    processes = []
    for source in sources:
        places = {"PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--measure", *words]
        started = subprocess.Popen(
            command, env=os.environ | places, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append((started.stdin, started.stdout))
    said = [answers.readline() for _, answers in processes]
    while {*said} == {f"{TURN}\n"}:
        for place, (turns, answers) in enumerate(processes):
            turns.write("\n")
            turns.flush()
            said[place] = answers.readline()
    if any(not answer.startswith("{") for answer in said):
        raise SystemExit("the two checkouts do not measure the same rows: " + " and ".join(map(repr, said)))
    return [json.loads(answer) for answer in said]


def table(runs: list[list[Rows]]) -> str:
    lines = []
    for name, row in runs[0][0].items():
        lines.append(name)
        for column in row:
            pairs = [(old[name][column], new[name][column]) for old, new in runs]
            ratios = [new / old for old, new in pairs]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            old, new = (median(values) for values in zip(*pairs, strict=True))
            lines.append(f"  {column:28} {old:10.3f} {new:10.3f}   new/old {median(ratios):.3f}   ({spread})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path, metavar="SRC", help="the src folders of old and new")
    parser.add_argument("--rows", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--widths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.measure:
        return measure(said)
    if len(said.sources) != 2:
        parser.error("give the src folders of two checkouts, old and new")
    words = ["--rows", *said.rows, "--widths", *map(str, said.widths), "--repeats", str(said.repeats)]
    runs = []
    for run in range(said.runs):
        runs.append(together(words, said.sources))
        print(f"run {run + 1} of {said.runs} done", file=sys.stderr)
    print(table(runs))


if __name__ == "__main__":
    main()
