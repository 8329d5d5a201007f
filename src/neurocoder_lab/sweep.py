"""Sweeps: a grid of runs on local processes or a Ray cluster. Finished runs are skipped, failures listed at the end."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from neurocoder_lab import experiments
from neurocoder_lab.progress import Progress
from neurocoder_lab.run import execute, finished, folder_of
from neurocoder_lab.store import LabError, make_folder
from neurocoder_lab.task import Config, Experiment

ATTEMPTS = 3  # of a run whose process or node died
FILES = ("config.json", "environment.json", "metrics.jsonl", "result.json")


@dataclass(frozen=True)
class Outcome:
    """How one run of a sweep ended."""

    config: Config
    error: str | None = None


def grid(experiment: Experiment, axes: dict[str, Any], seeds: int, **settings: Any) -> list[Config]:
    """Every combination of the axes with every seed; seeds outermost, so that whole tables fill up early."""
    names, values = [*axes], [*axes.values()]
    return [
        experiment.config(seed=seed, **dict(zip(names, chosen, strict=True)), **settings)
        for seed in range(seeds)
        for chosen in product(*values)
    ]


def sweep(
    experiment: Experiment,
    configs: list[Config],
    runs: Path,
    *,
    workers: int = 1,
    cluster: str | None = None,
    checkpoint_seconds: float = 30.0,
) -> list[Outcome]:
    """Run what is not finished yet; one outcome a config, in their order."""
    make_folder(runs)
    runs = runs.resolve()
    todo = [config for config in configs if finished(experiment, config, runs) is None]
    outcomes = {config: Outcome(config) for config in configs}
    go = _on_ray(cluster) if cluster else _on_processes(workers)
    jobs = [(experiment.name, config, runs, checkpoint_seconds) for config in todo]
    with Progress(f"{experiment.name} sweep", len(configs), len(configs) - len(todo)) as progress:
        for done, (job, error) in enumerate(go(jobs), len(configs) - len(todo) + 1):
            outcomes[job[1]] = Outcome(job[1], error)
            progress.show(done, note="" if error is None else f"failed: {experiment.label(job[1])}")
    return [*outcomes.values()]


Job = tuple[str, Config, Path, float]


def _one(job: Job) -> str | None:
    """Run one job in this process; returns what went wrong."""
    name, config, runs, seconds = job
    try:
        execute(experiments.get(name), config, runs, checkpoint_seconds=seconds, quiet=True)
    except LabError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    return None


def _on_processes(workers: int) -> Callable[[list[Job]], Iterator[tuple[Job, str | None]]]:
    if workers < 1:
        raise LabError(f"--workers must be at least 1, got {workers}")

    def go(jobs: list[Job]) -> Iterator[tuple[Job, str | None]]:
        """A dead process breaks its pool: what it had not finished goes to the next one, and resumes."""
        left = dict.fromkeys(range(len(jobs)), ATTEMPTS)
        while left:
            with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
                futures: dict[Future, int] = {pool.submit(_one, jobs[i]): i for i in left}
                for future in as_completed(futures):
                    place = futures[future]
                    try:
                        error = future.result()
                    except BrokenProcessPool:
                        left[place] -= 1
                        if left[place]:
                            continue
                        error = f"its process died {ATTEMPTS} times, perhaps for want of memory"
                    del left[place]
                    yield jobs[place], error

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
            ray.init(address=None if address == "local" else address, log_to_driver=False, include_dashboard=False)
        try:
            task = ray.remote(num_cpus=1, max_retries=ATTEMPTS, retry_exceptions=False)(remote)
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
    for name, text in files.items():
        if not (folder / name).is_file():
            (folder / name).write_text(text)
