"""The command line: `neurocoder list | run | sweep | retract | tune | report | claims | bench`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from rich.console import Console
from rich.table import Table

from neurocoder_lab import experiments, tuning
from neurocoder_lab.store import LabError, Stopped, make_folder
from neurocoder_lab.task import Budget, Experiment

RUNS, RESULTS = Path("runs"), tuning.folder()
COLOURS = {
    "holds": "green",
    "contradicted": "red",
    "inconclusive": "yellow",
    "budget-too-short": "yellow",
    "not-run": "dim",
}


@dataclass(frozen=True)
class Engine:
    """How to run, whatever the experiment."""

    runs: Path = RUNS
    """Folder of all runs: each has <experiment>/<name>/seed-N in it, and goes on there if it was stopped."""
    checkpoint_seconds: float = 30.0
    """Time between checkpoints."""


def run(experiment: Experiment, arguments: list[str]) -> int:
    """One run, or the rest of it."""
    from neurocoder_lab.run import execute, finished, folder_of

    about = f"{experiment.summary[0].upper()}{experiment.summary[1:]}. Reproduces {experiment.reproduces}."
    kind = make_dataclass(
        "Run",
        [
            ("config", tyro.conf.OmitArgPrefixes[experiment.config], field(default=experiment.config())),
            ("engine", tyro.conf.OmitArgPrefixes[Engine], field(default=Engine())),
            ("precision", Annotated[Literal["no", "bf16", "fp16"], tyro.conf.arg(help="Mixed precision.")], "no"),
            ("threads", Annotated[int, tyro.conf.arg(help="CPU threads.")], 1),
        ],
    )
    args = tyro.cli(kind, prog=f"neurocoder run {experiment.name}", description=about, args=arguments)
    engine = args.engine
    known = finished(experiment, args.config, engine.runs) is not None
    result = execute(
        experiment,
        args.config,
        engine.runs,
        checkpoint_seconds=engine.checkpoint_seconds,
        precision=args.precision,
        threads=args.threads,
    )
    numbers = {name: value for name, value in result["final"].items() if isinstance(value, int | float)}
    print(
        "  ".join(
            f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value:,}"
            for name, value in numbers.items()
        )
    )
    took = "finished before, in" if known else "took"
    print(f"{took} {result['seconds']:.0f} s; all of it in {folder_of(experiment, args.config, engine.runs)}")
    return 0


def sweep(experiment: Experiment, arguments: list[str]) -> int:
    """A grid of runs, and its results."""
    from neurocoder_lab import results
    from neurocoder_lab.sweep import distil, grid
    from neurocoder_lab.sweep import sweep as go
    from neurocoder_lab.task import as_dict

    kind = make_dataclass(
        "Sweep",
        [
            *_axes(experiment.axes, experiment.main),
            ("seeds", Annotated[int, tyro.conf.arg(help="Seeds 0 to this, less one.")], 3),
            ("budget", Annotated[Budget, tyro.conf.arg(help="smoke: seconds; desk: what we publish; paper.")], "desk"),
            ("workers", Annotated[int, tyro.conf.arg(help="Local processes, one thread each.")], 1),
            ("cluster", Annotated[str | None, tyro.conf.arg(help="Address of a Ray cluster, or 'local'.")], None),
            ("engine", tyro.conf.OmitArgPrefixes[Engine], field(default=Engine())),
            (
                "results",
                Annotated[Path, tyro.conf.arg(help="Folder of results; what it has is not run.")],
                RESULTS,
            ),
            ("dirty", Annotated[bool, tyro.conf.arg(help="Take in runs of uncommitted code.")], False),
        ],
    )
    about = (
        f"Every combination of: {', '.join(experiment.axes)}, and seeds. Finished runs, and those in the results, are "
        "skipped (neurocoder retract takes superseded ones out). To go on changing the code meanwhile: make worktree."
    )
    args = tyro.cli(kind, prog=f"neurocoder sweep {experiment.name}", description=about, args=arguments)
    chosen = {name: getattr(args, name) for name in experiment.axes}
    empty = [name for name, values in chosen.items() if not values]
    if empty or args.seeds < 1:
        raise LabError(f"nothing to run: {'--seeds must be at least 1' if not empty else f'--{empty[0]} names none'}")
    make_folder(args.results)
    with tuning.at(args.results):
        configs = [experiment.resolve(config) for config in grid(experiment, chosen, args.seeds, budget=args.budget)]
    known = {results.identity(run["config"]) for run in results.load(args.results, experiment.name, args.dirty)}
    todo = [config for config in configs if results.identity(as_dict(config)) not in known]
    if len(todo) < len(configs):
        print(f"{len(configs) - len(todo)} of {len(configs)} runs are in {args.results} already")
    try:
        outcomes = go(
            experiment,
            todo,
            args.engine.runs,
            workers=args.workers,
            cluster=args.cluster,
            checkpoint_seconds=args.engine.checkpoint_seconds,
        )
    except Stopped:
        distil(experiment, todo, args.engine.runs, args.results, args.dirty)
        raise
    failed = {outcome.config: outcome.error for outcome in outcomes if outcome.error is not None}
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} runs finished")
    for config, error in failed.items():
        print(f"failed: {experiment.label(config)} seed {config.seed}: {error}", file=sys.stderr)
    ended = [config for config in todo if config not in failed]
    file = distil(experiment, ended, args.engine.runs, args.results, args.dirty)
    if file.is_file():
        print(f"results in {file}; to see them: neurocoder report --results {file.parent}")
    return 1 if failed else 0


def retract(experiment: Experiment, arguments: list[str]) -> int:
    """Take superseded runs out of the results."""
    from neurocoder_lab import results
    from neurocoder_lab.run import set_aside

    places = experiment.axes | {"budget": get_args(Budget)}
    kind = make_dataclass(
        "Retract",
        [
            *_axes(places, dict.fromkeys(places, ())),
            ("seeds", Annotated[tuple[int, ...], tyro.conf.arg(help="Which seeds; all if none is named.")], ()),
            ("superseded", Annotated[bool, tyro.conf.arg(help="Only runs made again with other settings.")], False),
            ("dirty", Annotated[bool, tyro.conf.arg(help="Only runs of uncommitted code.")], False),
            ("results", Annotated[Path, tyro.conf.arg(help="Folder of results.")], RESULTS),
            ("runs", Annotated[Path, tyro.conf.arg(help="Folder of runs: theirs go to retracted/ in it.")], RUNS),
            ("yes", Annotated[bool, tyro.conf.arg(help="Do it; without, only say what would go.")], False),
        ],
    )
    about = "Take runs out of the results that newer code supersedes; an axis that is not named matches all its values."
    args = tyro.cli(kind, prog=f"neurocoder retract {experiment.name}", description=about, args=arguments)
    known = results.load(args.results, experiment.name, dirty_too=True)
    if not known:
        raise LabError(f"{args.results} holds no results of {experiment.name}: name another folder with --results")
    gone = results.superseded(known, experiment.axes) if args.superseded else known
    chosen = {name: getattr(args, name) for name in places} | {"seed": args.seeds}
    gone = [run for run in gone if all(run["config"].get(name) in some for name, some in chosen.items() if some)]
    gone = [run for run in gone if results.dirty(run) or not args.dirty]
    for name in places if gone else ():
        print(f"{name}: {', '.join(sorted({str(run['config'].get(name)) for run in gone}))}")
    file = args.results / f"{experiment.name}.json"
    if args.yes and gone:
        aside = sum(set_aside(experiment, run["config"], args.runs) for run in gone)
        results.retract(args.results, experiment.name, gone)
        print(f"{len(gone)} runs taken out of {file}; {aside} folders of runs moved to {args.runs / 'retracted'}")
    else:
        print(f"{len(gone)} runs of {len(known)} would be taken out of {file}{'; to do it: --yes' if gone else ''}")
    return 0


def _axes(axes: dict[str, tuple[Any, ...]], defaults: dict[str, tuple[Any, ...]]) -> list[Any]:
    """An option for each axis: which of its values."""
    return [
        (
            name,
            Annotated[tuple[Literal[values], ...], tyro.conf.arg(help="Which of them.")],
            field(default=defaults.get(name, values)),
        )
        for name, values in axes.items()
    ]


def list_experiments() -> None:
    """The experiments, and what each reproduces."""
    table = Table("name", "reproduces", "what", "sweeps over", box=None)
    for experiment in experiments.every():
        axes = ", ".join(f"{len(values)} {name}s" for name, values in experiment.axes.items())
        table.add_row(experiment.name, experiment.reproduces, experiment.summary, axes)
    Console().print(table)
    print("\nneurocoder run NAME --help shows the settings of one")


def tune(experiment: Experiment, arguments: list[str]) -> int:
    """Settings chosen on held-out data."""
    if not experiment.grids:
        raise LabError(f"{experiment.name} has nothing to tune")
    tunable = tuple(sorted({setting for grid in experiment.grids for setting in grid.settings()}))
    places = {name: experiment.axes[name] for grid in experiment.grids for name in grid.over}
    kind = make_dataclass(
        "Tune",
        [
            (
                "settings",
                Annotated[tuple[Literal[tunable], ...], tyro.conf.arg(help="What to choose.")],
                field(default=tunable),
            ),
            *_axes(places, {}),
            ("seeds", Annotated[int, tyro.conf.arg(help="Seeds 0 to this, less one; at least three.")], 3),
            ("runs", Annotated[Path, tyro.conf.arg(help="Folder of the runs.")], RUNS / "tuning"),
            ("results", Annotated[Path, tyro.conf.arg(help="Folder of results, where tuned.json goes.")], RESULTS),
            ("workers", Annotated[int, tyro.conf.arg(help="Local processes, one thread each.")], 1),
        ],
    )
    about = (
        "Choose settings on held-out data, for all later runs: they go to tuned.json beside the results, and what is "
        "there comes before what the package has."
    )
    args = tyro.cli(kind, prog=f"neurocoder tune {experiment.name}", description=about, args=arguments)
    # an axis that was left as it is narrows nothing: not every grid has all of its values
    axes = {name: getattr(args, name) for name, values in places.items() if getattr(args, name) != values}
    tuning.tune(experiment, args.runs, args.results, args.seeds, args.workers, args.settings, axes)
    return 0


def report(results: Path = RESULTS, out: Path = Path("report.html"), dirty: bool = False) -> None:
    """Write one self-contained page: claims, tables beside the papers', figures.

    Args:
        results: folder of results.
        out: the page.
        dirty: take in runs of uncommitted code.
    """
    from neurocoder_lab.report import write

    print(write(results, out, dirty))


def claims(results: Path = RESULTS, json: bool = False, dirty: bool = False) -> None:
    """Every claim of both papers: their number, ours, and the verdict.

    Args:
        results: folder of results.
        json: print a list of objects for machines.
        dirty: take in runs of uncommitted code.
    """
    from neurocoder_lab.claims import judge, unclean

    found = judge(results, dirty)
    left_out = 0 if dirty else unclean(results)
    if left_out:
        text = (
            f"{left_out} runs in {results} were made by code with uncommitted changes: left out (--dirty takes them in)"
        )
        print(text, file=sys.stderr)
    if json:
        print(_json([dataclasses.asdict(claim) for claim in found]))
        return
    table = Table("claim", "paper", "ours: mean ± std (n)", "budget", "verdict")
    for column in table.columns:
        column.overflow = "fold"
    table.columns[-1].no_wrap = True
    for claim in found:
        paper = ", ".join(f"{name} {value}" for name, value in claim.paper.items() if not isinstance(value, dict))
        verdict = f"[{COLOURS[claim.verdict]}]{claim.verdict}[/]"
        table.add_row(f"[bold]{claim.id}[/]\n{claim.statement}", paper, claim.ours, claim.budget or "", verdict)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(summary([claim.verdict for claim in found]))


def summary(verdicts: list[str]) -> str:
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in COLOURS if verdict in verdicts)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1)


def bench(
    what: tyro.conf.Positional[Literal["layers", "networks"]] = "layers",
    repeats: int = 31,
    widths: tuple[int, ...] = (512, 1024, 2048, 4096),
    compiled: bool = False,
    networks: tuple[Literal["mlp", "lenet", "densenet", "polynomial-gru"], ...] = ("mlp", "lenet", "polynomial-gru"),
    seeds: int = 3,
    out: Path | None = None,
) -> None:
    """Speed and size against plain layers, or plain networks, as ratios; one thread.

    Args:
        what: layers against nn.Linear, or the networks of the papers.
        repeats: rounds; the figure is the median.
        widths: layers: of the square program-memory layers.
        compiled: layers: also torch.compile (takes minutes).
        networks: networks: which of them; densenet, of 100 layers, takes half an hour.
        seeds: networks: how often to measure anew.
        out: also write the ratios to this JSON file; of networks, results/speed.json decides claims.
    """
    if what == "networks":
        from neurocoder_lab import speed

        return speed.measure(networks, repeats, seeds, out)
    from neurocoder_lab.bench import measure

    measure(repeats, [*widths], compiled, out)


def _usage(command: str, about: str) -> Callable[[str], None]:
    """What the overview of commands shows of one that is parsed once its experiment is known."""

    def usage(experiment: tyro.conf.Positional[str]) -> None:
        pass

    usage.__doc__ = (
        f"{about}: neurocoder {command} NAME --help.\n\nArgs:\n    experiment: one that neurocoder list shows."
    )
    return usage


def _named(command: str, words: list[str]) -> tuple[Experiment, list[str]]:
    """The experiment named among the words, and the rest of them."""
    places = [place for place, word in enumerate(words) if word in experiments.NAMES]
    places = places or [0 for word in words[:1] if not word.startswith("-")]
    if not places:
        raise LabError(f"name an experiment: neurocoder {command} NAME; there is {', '.join(experiments.NAMES)}")
    return experiments.get(words[places[0]]), words[: places[0]] + words[places[0] + 1 :]


def _command(commands: dict[str, Callable[..., Any]], prog: str, description: str, args: list[str]) -> None:
    """Run the command that is asked for."""
    if args == ["--version"]:
        from neurocoder import __version__

        print(prog, __version__)
        return
    if args and not args[0].startswith("-") and args[0] not in commands:
        near = get_close_matches(args[0], commands, n=1, cutoff=0.0)
        raise LabError(f"no command is called {args[0]!r}; did you mean {near[0]}? All: {', '.join(commands)}")
    tyro.extras.subcommand_cli_from_dict(commands, prog=prog, description=description, args=args)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    inner = {"run": run, "sweep": sweep, "retract": retract, "tune": tune}
    try:
        if arguments and arguments[0] in inner and arguments[1:] not in (["-h"], ["--help"]):
            return inner[arguments[0]](*_named(arguments[0], arguments[1:]))
        _command(
            {
                "list": list_experiments,
                "run": _usage("run", "Run one experiment, or go on with it"),
                "sweep": _usage("sweep", "Run a grid of models, settings and seeds"),
                "retract": _usage("retract", "Take superseded runs out of the results"),
                "tune": _usage("tune", "Choose settings on held-out data"),
                "report": report,
                "claims": claims,
                "bench": bench,
            },
            prog="neurocoder",
            description="The experiments of Neurocoder and Modular Networks: run, resume, sweep, tune, report.",
            args=arguments,
        )
    except LabError as error:
        print(f"neurocoder: {error}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("stopped; what was finished is kept", file=sys.stderr)
        return 3
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0
