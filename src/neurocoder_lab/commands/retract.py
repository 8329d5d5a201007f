"""`neurocoder retract NAME`: take superseded runs out of the results."""

from __future__ import annotations

from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import tyro

from neurocoder_lab import results
from neurocoder_lab.commands.options import RUNS, axes, option
from neurocoder_lab.errors import LabError
from neurocoder_lab.provenance import dirty

if TYPE_CHECKING:
    from neurocoder_lab.task import Experiment


def retract(experiment: Experiment, arguments: list[str]) -> int:
    from neurocoder_lab.run import set_aside
    from neurocoder_lab.task import Budget

    places = experiment.axes | {"budget": get_args(Budget)}
    args = _parsed(experiment, places, arguments)
    known = results.load(args.results, experiment.name, dirty_too=True)
    if not known:
        raise LabError(f"{args.results} holds no results of {experiment.name}: name another folder with --results")
    gone = results.superseded(known, experiment.axes) if args.superseded else known
    chosen = {name: getattr(args, name) for name in places} | {"seed": args.seeds}
    gone = [run for run in gone if all(run["config"].get(name) in some for name, some in chosen.items() if some)]
    gone = [run for run in gone if dirty(run["environment"]) or not args.dirty]
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


def _parsed(experiment: Experiment, places: dict[str, tuple[Any, ...]], arguments: list[str]) -> Any:
    kind = make_dataclass(
        "Retract",
        [
            *axes(places, dict.fromkeys(places, ())),
            option("seeds", tuple[int, ...], (), "Which seeds; all if none is named."),
            option("superseded", bool, False, "Only runs made again with other settings."),
            option("dirty", bool, False, "Only runs of uncommitted code."),
            option("results", Path, results.folder(), "Folder of results."),
            option("runs", Path, RUNS, "Folder of runs: theirs go to retracted/ in it."),
            option("yes", bool, False, "Do it; without, only say what would go."),
        ],
    )
    about = "Take runs out of the results that newer code supersedes; an axis that is not named matches all its values."
    return tyro.cli(kind, prog=f"neurocoder retract {experiment.name}", description=about, args=arguments)
