"""`neurocoder run NAME`: one run, or the rest of it."""

from __future__ import annotations

from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from neurocoder_lab import experiments, results
from neurocoder_lab.commands.options import Engine, flat, option

if TYPE_CHECKING:
    from neurocoder_lab.task import Experiment


def run(experiment: Experiment, arguments: list[str]) -> int:
    from neurocoder_lab.run import execute, finished, folder_of

    kind = make_dataclass(
        "Run",
        [
            flat("config", experiment.config()),
            flat("engine", Engine()),
            option("results", Path, results.folder(), "Folder of results: what was tuned beside them counts."),
            option("threads", int, 1, "CPU threads."),
        ],
    )
    about = str(experiments.CATALOGUE[experiment.name])
    args = tyro.cli(kind, prog=f"neurocoder run {experiment.name}", description=about, args=arguments)
    engine = args.engine
    with results.at(args.results):
        known = finished(experiment, args.config, engine.runs) is not None
        result = execute(
            experiment,
            args.config,
            engine.runs,
            checkpoint_seconds=engine.checkpoint_seconds,
            precision=engine.precision,
            threads=args.threads,
        )
        folder = folder_of(experiment, args.config, engine.runs)
    numbers = {name: value for name, value in result["final"].items() if isinstance(value, int | float)}
    print("  ".join(f"{name} {_number(value)}" for name, value in numbers.items()))
    print(f"{'finished before, in' if known else 'took'} {result['seconds']:.0f} s; all of it in {folder}")
    return 0


def _number(value: float) -> str:
    return f"{value:.5g}" if isinstance(value, float) else f"{value:,}"
