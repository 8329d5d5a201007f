"""The run engine: train a task in a folder, measure, and go on after a kill as if nothing had happened.

A folder holds config.json, environment.json, metrics.jsonl and checkpoints/; at the end, in place of the last,
result.json and model.safetensors. Times are in result.json alone: all else is the same, to the bit, however often a
run was interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import fields
from math import isfinite
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

import neurocoder as nc
from neurocoder_lab.checkpoints import capture, load_checkpoint, restore, save_checkpoint
from neurocoder_lab.errors import LabError, Stopped
from neurocoder_lab.progress import Progress
from neurocoder_lab.provenance import Precision, environment, note, source
from neurocoder_lab.signals import stopping
from neurocoder_lab.store import locked, make_folder, read_json, write_json
from neurocoder_lab.task import Config, Experiment, Task, as_dict

CONFIG_FORMAT = 1


def folder_of(experiment: Experiment, config: Config, runs: Path) -> Path:
    return runs / experiment.name / experiment.label(config) / f"seed-{config.seed}"


def set_aside(experiment: Experiment, settings: dict[str, Any], runs: Path) -> bool:
    """Move the folder of a run, if it is there, to <runs>/retracted, so that it is run anew."""
    try:
        config = experiment.config(**settings)
    except (TypeError, LabError):  # settings of another version: no run of this one has its folder
        return False
    folder = folder_of(experiment, config, runs)
    if not (folder / "result.json").is_file():
        return False
    target = runs / "retracted" / folder.relative_to(runs)
    while target.exists():
        target = target.with_name(f"{target.name}+")
    make_folder(target.parent)
    folder.rename(target)
    return True


def finished(
    experiment: Experiment, config: Config, runs: Path, engine: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """The result of a run that has ended, if its folder has that of this very config."""
    folder = folder_of(experiment, config, runs)
    if not (folder / "result.json").is_file():
        return None
    _check_config(experiment.resolve(config), folder, engine)
    return read_json(folder / "result.json")


def execute(
    experiment: Experiment,
    config: Config,
    runs: Path = Path("runs"),
    *,
    checkpoint_seconds: float = 30.0,
    precision: Precision = "no",
    threads: int = 1,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run an experiment, or go on with it, and return its result."""
    if threads < 1:
        raise LabError(f"threads must be at least 1, got {threads}")
    if not checkpoint_seconds >= 0:
        raise LabError(f"seconds between checkpoints must not be negative, got {checkpoint_seconds}")
    torch.set_num_threads(threads)
    config = experiment.resolve(config)
    folder = folder_of(experiment, config, runs)
    on_cpu = config.on_cpu or not torch.accelerator.is_available()
    accelerator = Accelerator(mixed_precision=precision, cpu=on_cpu)
    first = accelerator.is_main_process
    if first:
        make_folder(folder)
    accelerator.wait_for_everyone()
    engine = {"precision": precision, "threads": threads, "processes": accelerator.num_processes}
    with locked(folder) if first else nullcontext():
        result = finished(experiment, config, runs, engine)
        if result is not None:
            return result
        if (folder / "config.json").is_file():
            _check_config(config, folder, engine)
        set_seed(config.seed)
        with closing(experiment.start(config)) as task:
            task.attach(accelerator)  # what cannot be run so is refused before the folder is that of such a run
            _check_data(task, folder)
            if first and not (folder / "config.json").is_file():
                content = {"format": CONFIG_FORMAT, "experiment": experiment.name, "config": as_dict(config)}
                write_json(folder / "config.json", content | {"engine": engine})
            accelerator.wait_for_everyone()
            run = _Run(task, folder, first, checkpoint_seconds, say=_say if first and not quiet else lambda text: None)
            run.resume()
            if first:
                note(folder / "environment.json", environment(str(accelerator.device), engine, task.fingerprint))
            title = f"{experiment.name} {experiment.label(config)} seed {config.seed}"
            with stopping() as asked, Progress(title, task.steps, run.step, quiet or not first) as progress:
                return run.train(asked, progress)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


class _Run:
    def __init__(self, task: Task, folder: Path, first: bool, seconds: float, say: Callable[[str], None]):
        self.task, self.folder, self.first, self.seconds, self.say = task, folder, first, seconds, say
        self.step, self.count, self.spent = 0, 0, 0.0
        self.sums: dict[str, Tensor] = {}
        self.started = time.monotonic()

    def train(self, asked: Callable[[], bool], progress: Progress) -> dict[str, Any]:
        task, latest = self.task, {}
        saved = self.started = time.monotonic()
        with open(self.folder / "metrics.jsonl", "a") if self.first else nullcontext() as metrics:
            task.network.train()
            while self.step < task.steps:
                for name, value in task.step(self.step).items():
                    self.sums[name] = self.sums[name] + value.detach() if name in self.sums else value.detach().clone()
                self.count += 1
                self.step += 1
                if task.due(self.step) or self.step == task.steps:
                    latest = self._measure(metrics)
                progress.show(self.step, latest)
                if self._agreed(asked) and self.step < task.steps:
                    self.checkpoint(metrics)
                    raise Stopped(f"stopped at step {self.step} of {task.steps}; the same command goes on from there")
                if self.first and time.monotonic() - saved > self.seconds:
                    self.checkpoint(metrics)
                    saved = time.monotonic()
            self.checkpoint(metrics)  # a kill while concluding costs the conclusion alone
        return self._conclude(latest or self._last())

    def _agreed(self, asked: Callable[[], bool]) -> bool:
        """Whether to stop now: several processes stop after the same step, so they ask each other, now and then."""
        accelerator = self.task.accelerator
        if accelerator.num_processes == 1:
            return asked()
        if self.step % self.task.evaluate_every:
            return False
        flag = torch.tensor(float(asked()), device=accelerator.device)
        return bool(torch.as_tensor(accelerator.reduce(flag, "sum")) > 0)

    def _measure(self, metrics: Any) -> dict[str, float]:
        """Log what was averaged since the last time, and an evaluation."""
        task = self.task
        names, totals = [*self.sums], [*self.sums.values()]
        means: Any = torch.stack(totals) / self.count if totals else torch.zeros(0)
        if task.accelerator.num_processes > 1:
            means = task.accelerator.reduce(means, "mean")
        self.sums, self.count = {}, 0
        row: dict[str, float] = dict(zip(names, means.tolist(), strict=True))
        task.network.eval()
        with torch.no_grad():
            row |= task.evaluate()
        task.network.train()
        bad = [name for name, value in row.items() if not isfinite(value)]
        if bad:
            raise LabError(f"{', '.join(bad)} is not finite after step {self.step}: lower the learning rate")
        if self.first:
            try:
                metrics.write(json.dumps({"step": self.step} | row) + "\n")
                metrics.flush()
            except OSError as error:
                raise LabError(f"{self.folder}/metrics.jsonl cannot be written: {error.strerror}") from None
        return row

    def _last(self) -> dict[str, float]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return {name: value for name, value in json.loads(lines[-1]).items() if name != "step"}

    def _conclude(self, latest: dict[str, float]) -> dict[str, Any]:
        task = self.task
        task.network.eval()
        with torch.no_grad():
            ending = task.conclude()
        seconds = self.spent + time.monotonic() - self.started
        size = sum(parameter.numel() for parameter in task.model.parameters() if parameter.requires_grad)
        final = {"steps": self.step, "parameters": size} | latest | ending
        result = {"final": final, "seconds": round(seconds, 1)}
        if self.first:
            nc.save(task.accelerator.unwrap_model(task.network), self.folder / "model.safetensors")
            write_json(self.folder / "result.json", result)
            rmtree(self.folder / "checkpoints", ignore_errors=True)  # nobody goes on from there, and they are large
        return result

    def checkpoint(self, metrics: Any) -> None:
        if not self.first:
            return
        metrics.flush()
        os.fsync(metrics.fileno())  # a checkpoint counts on what was logged before it
        tensors, about = capture(self.task)
        tensors |= {f"sums.{name}": tensor for name, tensor in self.sums.items()}
        seconds = self.spent + time.monotonic() - self.started
        about |= {"count": self.count, "metrics": metrics.tell(), "seconds": seconds}
        save_checkpoint(self.folder / "checkpoints", self.step, tensors, about)

    def resume(self) -> None:
        """Go back to the newest whole checkpoint; metrics logged after it are logged again."""
        log = self.folder / "metrics.jsonl"
        newest = load_checkpoint(self.folder / "checkpoints", log.stat().st_size if log.exists() else 0, self.say)
        if newest is None:
            if self.first:
                log.unlink(missing_ok=True)
            return
        tensors, about = newest
        restore(self.task, tensors, about)
        device = self.task.accelerator.device
        sums = {name: tensor for name, tensor in tensors.items() if name.startswith("sums.")}
        self.sums = {name.removeprefix("sums."): tensor.to(device) for name, tensor in sums.items()}
        self.step, self.count, self.spent = about["step"], about["count"], about["seconds"]
        if self.first:
            with open(log, "r+") as file:
                file.truncate(about["metrics"])
        self.say(f"going on from step {self.step} of {self.task.steps}")


def _check_config(config: Config, folder: Path, engine: dict[str, Any] | None) -> None:
    """Raise unless the folder is that of this config, run in this way."""
    stored = read_json(folder / "config.json")
    known = {field.name for field in fields(config)}
    theirs = stored.get("config", {}) if isinstance(stored, dict) else {}
    if not theirs or stored.get("format") != CONFIG_FORMAT or theirs.keys() != known:
        odd = ", ".join(sorted(theirs.keys() ^ known)) or "its format"
        raise LabError(f"{folder}/config.json is from another version (it differs in {odd}): use another --runs folder")
    ours = json.loads(json.dumps(as_dict(config))) | (engine or {})
    theirs = theirs | stored.get("engine", {})
    differing = [
        f"{name} {theirs.get(name)!r}, now {value!r}" for name, value in ours.items() if value != theirs.get(name)
    ]
    if differing:
        raise LabError(f"{folder} holds a run of another config ({'; '.join(differing)}): use another --runs folder")


def _check_data(task: Task, folder: Path) -> None:
    """Raise if the run began with other data."""
    file = folder / "environment.json"
    known = read_json(file).get("data", task.fingerprint) if file.is_file() else task.fingerprint
    if known != task.fingerprint:
        raise LabError(
            f"{folder} holds a run that began with other data ({known}; these are {task.fingerprint}): point "
            "NEUROCODER_DATA at those, or use another --runs folder"
        )


source()  # now, for this process and those forked from it: the code that runs is the code that was imported
