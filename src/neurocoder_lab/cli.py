"""The command line: which command is asked for, and of which experiment; commands/ has what each does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import tyro

from neurocoder_lab import experiments
from neurocoder_lab.commands.bench import bench
from neurocoder_lab.commands.claims import claims
from neurocoder_lab.commands.list import list_experiments
from neurocoder_lab.commands.report import report
from neurocoder_lab.commands.retract import retract
from neurocoder_lab.commands.run import run
from neurocoder_lab.commands.sweep import sweep
from neurocoder_lab.commands.tune import tune
from neurocoder_lab.errors import LabError, guarded

if TYPE_CHECKING:
    from neurocoder_lab.task import Experiment

OF_AN_EXPERIMENT = {"run": run, "sweep": sweep, "retract": retract, "tune": tune}  # parsed once that is known


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the code to end with."""
    words = sys.argv[1:] if arguments is None else arguments
    return guarded(lambda: _run(words))


def _run(words: list[str]) -> int:
    if words == ["--version"]:
        print("neurocoder", version("neurocoder"))
        return 0
    if words and words[0] in OF_AN_EXPERIMENT and words[1:] not in (["-h"], ["--help"]):
        return OF_AN_EXPERIMENT[words[0]](*_named(words[0], words[1:]))
    commands = _commands()
    if words and not words[0].startswith("-") and words[0] not in commands:
        near = get_close_matches(words[0], commands, n=1, cutoff=0.0)
        raise LabError(f"no command is called {words[0]!r}; did you mean {near[0]}? All: {', '.join(commands)}")
    about = "The experiments of Neurocoder and Modular Networks: run, resume, sweep, tune, report."
    tyro.extras.subcommand_cli_from_dict(commands, prog="neurocoder", description=about, args=words)
    return 0


def _commands() -> dict[str, Callable[..., Any]]:
    """What the overview shows."""
    return {
        "list": list_experiments,
        "run": _usage("run", "Run one experiment, or go on with it"),
        "sweep": _usage("sweep", "Run a grid of models, settings and seeds"),
        "retract": _usage("retract", "Take superseded runs out of the results"),
        "tune": _usage("tune", "Choose settings on held-out data"),
        "report": report,
        "claims": claims,
        "bench": bench,
    }


def _usage(command: str, about: str) -> Callable[[str], None]:
    """What the overview shows of a command that is parsed once its experiment is known."""

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
