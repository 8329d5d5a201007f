"""`neurocoder sweep NAME`: a grid of runs, and its results."""

from __future__ import annotations

import sys
from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from neurocoder_lab import results
from neurocoder_lab.commands.options import Engine, axes, flat, option
from neurocoder_lab.errors import LabError, Stopped
from neurocoder_lab.provenance import Precision
from neurocoder_lab.store import make_folder

if TYPE_CHECKING:
    from neurocoder_lab.task import Config, Experiment


def sweep(experiment: Experiment, arguments: list[str]) -> int:
    from neurocoder_lab.sweep import command_of, distil, grid
    from neurocoder_lab.sweep import sweep as go

    args = _parsed(experiment, arguments)
    chosen = {name: getattr(args, name) for name in experiment.axes}
    empty = [name for name, values in chosen.items() if not values]
    if empty or args.seeds < 1:
        raise LabError(f"nothing to run: {'--seeds must be at least 1' if not empty else f'--{empty[0]} names none'}")
    command = command_of(experiment, chosen, args.seeds, args.budget, args.engine.precision)
    make_folder(args.results)
    with results.at(args.results):
        asked = grid(experiment, chosen, args.seeds, budget=args.budget)
        configs = [*dict.fromkeys(map(experiment.resolve, asked))]
    todo = _missing(experiment, configs, args.results, args.dirty, args.engine.precision)
    try:
        outcomes = go(
            experiment,
            todo,
            args.engine.runs,
            workers=args.workers,
            cluster=args.cluster,
            checkpoint_seconds=args.engine.checkpoint_seconds,
            precision=args.engine.precision,
        )
    except Stopped:
        distil(experiment, todo, args.engine.runs, args.results, command, args.dirty, args.engine.precision)
        raise
    failed = {outcome.config: outcome.error for outcome in outcomes if outcome.error is not None}
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} runs finished")
    for config, error in failed.items():
        print(f"failed: {experiment.label(config)} seed {config.seed}: {error}", file=sys.stderr)
    ended = [config for config in todo if config not in failed]
    file = distil(experiment, ended, args.engine.runs, args.results, command, args.dirty, args.engine.precision)
    if file.is_file():
        print(f"results in {file}; to see them: neurocoder report --results {file.parent}")
    return 1 if failed else 0


def _parsed(experiment: Experiment, arguments: list[str]) -> Any:
    from neurocoder_lab.task import Budget

    kind = make_dataclass(
        "Sweep",
        [
            *axes(experiment.axes, experiment.main),
            option("seeds", int, 3, "Seeds 0 to this, less one."),
            option("budget", Budget, "desk", "smoke: seconds; desk: what we publish; paper."),
            option("workers", int, 1, "Local processes, one thread each."),
            option("cluster", str | None, None, "Address of a Ray cluster, or 'local'."),
            flat("engine", Engine()),
            option("results", Path, results.folder(), "Folder of results; what it has is not run."),
            option("dirty", bool, False, "Take in runs of uncommitted code."),
        ],
    )
    about = (
        f"Every combination of: {', '.join(experiment.axes)}, and seeds. Finished runs, and those in the results, are "
        "skipped (neurocoder retract takes superseded ones out). To go on changing the code meanwhile: make worktree."
    )
    return tyro.cli(kind, prog=f"neurocoder sweep {experiment.name}", description=about, args=arguments)


def _missing(
    experiment: Experiment, configs: list[Config], folder: Path, dirty_too: bool, precision: Precision
) -> list[Config]:
    """Those whose runs the results do not have; how many they have is said."""
    from neurocoder_lab.task import as_dict

    known = {
        results.identity(run["config"]): run["environment"].get("precision", "no")
        for run in results.load(folder, experiment.name, dirty_too)
    }
    other = {known.get(results.identity(as_dict(config)), precision) for config in configs} - {precision}
    if other:
        raise LabError(
            f"{folder} has some of these runs with --precision {' and '.join(sorted(other))}, not {precision}: ask for "
            "that, or take them out by neurocoder retract"
        )
    missing = [config for config in configs if results.identity(as_dict(config)) not in known]
    if len(missing) < len(configs):
        print(f"{len(configs) - len(missing)} of {len(configs)} runs are in {folder} already")
    return missing
