"""Sweeps: a grid of runs on local processes or a Ray cluster. Finished runs are skipped, failures listed at the end."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from neurocoder_lab import experiments, results
from neurocoder_lab.errors import LabError, Stopped
from neurocoder_lab.progress import Progress
from neurocoder_lab.provenance import Precision, dirty
from neurocoder_lab.run import execute, finished, folder_of
from neurocoder_lab.signals import end_with, handling, stopping
from neurocoder_lab.store import make_folder, read_json, replacing
from neurocoder_lab.task import Config, Experiment, as_dict

ATTEMPTS = 3  # of a run whose process or node died
FILES = ("config.json", "environment.json", "metrics.jsonl", "result.json")


@dataclass(frozen=True)
class Outcome:
    """How one run of a sweep ended."""

    config: Config
    error: str | None = None


def grid(experiment: Experiment, axes: dict[str, Any], seeds: int, **settings: Any) -> list[Config]:
    """Every combination of the axes with every seed; seeds outermost, so that whole tables fill up early.

    Values that do not go together are left out; it is an error only if none do.
    """
    configs, refused = [], None
    for seed, chosen in product(range(seeds), product(*axes.values())):
        try:
            configs.append(experiment.config(seed=seed, **dict(zip(axes, chosen, strict=True)), **settings))
        except LabError as error:
            refused = error
    if refused is not None and not configs:
        raise refused
    return configs


def sweep(
    experiment: Experiment,
    configs: list[Config],
    runs: Path,
    *,
    workers: int = 1,
    cluster: str | None = None,
    checkpoint_seconds: float = 30.0,
    precision: Precision = "no",
) -> list[Outcome]:
    """Run what is not finished yet; one outcome a config, in their order."""
    make_folder(runs)
    runs = runs.resolve()
    outcomes, todo = {config: Outcome(config) for config in configs}, []
    for config in configs:
        try:
            todo += [config] if finished(experiment, config, runs, {"precision": precision}) is None else []
        except LabError as error:
            outcomes[config] = Outcome(config, str(error))
    go = _on_ray(cluster) if cluster else _on_processes(workers, experiment)
    jobs = [(experiment.name, config, runs, checkpoint_seconds, precision) for config in todo]
    with Progress(f"{experiment.name} sweep", len(configs), len(configs) - len(todo)) as progress:
        for done, (job, error) in enumerate(go(jobs), len(configs) - len(todo) + 1):
            outcomes[job[1]] = Outcome(job[1], error)
            progress.show(done, note="" if error is None else f"failed: {experiment.label(job[1])}")
    return [*outcomes.values()]


def command_of(
    experiment: Experiment, axes: dict[str, tuple[Any, ...]], seeds: int, budget: str, precision: Precision = "no"
) -> str:
    """What to type for this sweep anywhere: nothing of folders and workers, and no axis that is taken as it comes."""
    words = f"neurocoder sweep {experiment.name} --budget {budget} --seeds {seeds}"
    words += f" --precision {precision}" if precision != "no" else ""
    for name, values in experiment.axes.items():
        if {*axes[name]} != {*experiment.main.get(name, values)}:
            chosen = [str(value) for value in (*values, None) if value in axes[name]]
            words += f" --{name.replace('_', '-')} {' '.join(chosen)}"
    return words


def distil(
    experiment: Experiment,
    configs: list[Config],
    runs: Path,
    folder: Path,
    command: str,
    dirty_too: bool = False,
    precision: Precision = "no",
) -> Path:
    """Merge what came of those of these runs that are finished into <folder>/<experiment>.json; returns the file.

    Each keeps the command that made it. Runs of uncommitted code are left out, and named, unless asked for.
    """
    distilled = []
    for config in configs:
        place = folder_of(experiment, config, runs)
        try:
            run = _distilled(experiment, config, runs, precision)
        except (LabError, OSError, ValueError) as error:
            print(f"left out {place}: {error}", file=sys.stderr)
            continue
        if run is None:
            continue
        if dirty(run["environment"]) and not dirty_too:
            what_to_do = "--dirty takes it in; to run it again, remove its folder"
            print(f"left out {place}: made by code with uncommitted changes ({what_to_do})", file=sys.stderr)
        else:
            distilled.append(run | {"command": command})
    return results.merge(folder, experiment.name, distilled)


def _distilled(
    experiment: Experiment, config: Config, runs: Path, precision: Precision = "no"
) -> dict[str, Any] | None:
    """What is published of a run; None while it is not finished."""
    result = finished(experiment, config, runs, {"precision": precision})
    place = folder_of(experiment, config, runs)
    if result is None:
        return None
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    curve = {name: [results.round_(row[name]) for row in rows] for name in rows[0]} if rows else {}
    environment = read_json(place / "environment.json")
    return {"config": as_dict(experiment.resolve(config)), **result, "curve": curve, "environment": environment}


Job = tuple[str, Config, Path, float, Precision]


def _one(job: Job) -> str | None:
    """Run one job in this process; returns what went wrong."""
    name, config, runs, seconds, precision = job
    try:
        execute(experiments.get(name), config, runs, checkpoint_seconds=seconds, precision=precision, quiet=True)
    except LabError as error:
        return str(error)
    except Stopped:
        raise
    except Exception:
        return traceback.format_exc()
    return None


def _child(job: Job, answer: Connection, alive: Connection, environment: dict[str, str]) -> None:
    """A process of its own for one job; it ends with the sweep. What it was forked from may have been started earlier,
    in another environment."""
    end_with(alive)
    os.environ.update(environment)
    with suppress(Stopped):  # without an answer it counts as dead, and is started again or left for the next sweep
        answer.send_bytes((_one(job) or "").encode())


def _on_processes(workers: int, experiment: Experiment) -> Callable[[list[Job]], Iterator[tuple[Job, str | None]]]:
    if workers < 1:
        raise LabError(f"--workers must be at least 1, got {workers}")
    context = multiprocessing.get_context("forkserver")  # one process imports everything, the runs are forked from it
    # every optimiser imports torch._dynamo
    context.set_forkserver_preload(["neurocoder_lab.run", experiment.config.__module__, "torch._dynamo"])

    def go(jobs: list[Job]) -> Iterator[tuple[Job, str | None]]:
        """A run whose process dies is started again, and resumes."""
        waiting, running = [(job, ATTEMPTS) for job in jobs], {}
        alive, _held = context.Pipe(duplex=False)  # its other end is closed when this process ends
        if jobs:
            # a terminal's ctrl-C reaches all processes: this one ends the others
            with handling(signal.SIG_IGN, signal.SIGINT):
                forkserver.ensure_running()
        with stopping() as asked:
            while waiting or running:
                while waiting and len(running) < workers:
                    job, left = waiting.pop(0)
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_child, args=(job, sender, alive, {**os.environ}))
                    process.start()
                    sender.close()
                    running[receiver] = (process, job, left - 1)
                for receiver in cast(list[Connection], wait([*running], timeout=0.5)):
                    process, job, left = running.pop(receiver)
                    try:
                        answer = receiver.recv_bytes().decode()  # before the process ends: a long one needs a reader
                        process.join()
                        yield job, answer or None
                    except EOFError:
                        process.join()
                        if left and not asked():
                            waiting.insert(0, (job, left))
                        elif not asked():
                            yield job, f"its process died {ATTEMPTS} times, perhaps for want of memory"
                if asked():
                    for process, *_ in running.values():
                        process.terminate()
                    for process, *_ in running.values():
                        process.join()
                    raise Stopped("the sweep was stopped; the same command goes on")

    return go


def _on_ray(address: str) -> Callable[[list[Job]], Iterator[tuple[Job, str | None]]]:
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise LabError("sweeps on a cluster need Ray: pip install 'neurocoder[lab,cluster]'") from None

    def remote(job: Job) -> tuple[str | None, dict[str, str]]:
        """The run's files travel back, for clusters whose nodes share no disk."""
        error = _one(job)
        folder = folder_of(experiments.get(job[0]), job[1], job[2])
        return error, {name: (folder / name).read_text() for name in FILES if error is None}

    def go(jobs: list[Job]) -> Iterator[tuple[Job, str | None]]:
        ours = not ray.is_initialized()
        if ours:
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise LabError(f"no Ray cluster at {address!r}: {error}") from None
        try:
            task = ray.remote(num_cpus=1, max_retries=ATTEMPTS, retry_exceptions=[Stopped])(remote)
            waiting = {task.remote(job): job for job in jobs}
            while waiting:
                ready, _ = ray.wait([*waiting], num_returns=1)
                job = waiting.pop(ready[0])
                try:
                    error, files = ray.get(ready[0])
                    _bring(job, files)
                except (RayError, OSError) as failure:
                    error = f"{type(failure).__name__}: {failure}"
                yield job, error
        finally:
            if ours:
                ray.shutdown()

    return go


def _bring(job: Job, files: dict[str, str]) -> None:
    folder = folder_of(experiments.get(job[0]), job[1], job[2])
    make_folder(folder)
    for name, text in files.items():  # the result last: where it is, all is
        with replacing(folder / name) as temporary:
            temporary.write_text(text)
