"""What an experiment is: a config, and a task that trains one model step by step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from neurocoder_lab.errors import LabError

Budget = Literal["smoke", "desk", "paper"]
Table = tuple[str, list[str], list[list[str]]]  # title, header, rows
Picture = tuple[str, str]  # title, SVG


@dataclass(frozen=True)
class Config:
    """Settings that every experiment has. A field that is None is filled in by the budget."""

    seed: int = 0
    """Fixes everything: data, their order, initial weights."""
    budget: Budget = "desk"
    """smoke: seconds; desk: what two CPU cores finish, and what we publish; paper: as published."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise LabError(f"seed must not be negative, got {self.seed}")

    @property
    def on_cpu(self) -> bool:
        """Whether it runs on the CPU even where there is an accelerator."""
        return False

    def check_counts(self, *names: str) -> None:
        """Raise unless each of these settings, where it is given, is at least 1."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LabError(f"{name} must be at least 1, got {value}")

    def check_positive(self, *names: str) -> None:
        """Raise unless each of these settings, where it is given, is a positive number."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise LabError(f"{name} must be a positive number, got {value}")


class Task:
    """One run: what it trains, on what, and what it measures. Randomness comes from torch's own generator alone.

    Attributes:
        model, optimiser: as built by the experiment, on the CPU.
        steps: how many there are.
        evaluate_every: steps between evaluations.
        network: the model to call in `step`, once attached: it may be spread over processes.
        accelerator: the devices and processes at hand, once attached.
        fingerprint: of the data.
    """

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer, steps: int, evaluate_every: int):
        self.model, self.optimiser = model, optimiser
        self.steps, self.evaluate_every = steps, evaluate_every
        self.fingerprint = "none"

    def attach(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.network, self.optimiser = accelerator.prepare(self.model, self.optimiser)

    def due(self, step: int) -> bool:
        """Whether to evaluate after so many steps; there is an evaluation after the last one in any case."""
        return step % self.evaluate_every == 0

    def step(self, index: int) -> dict[str, Tensor]:
        """Train on one batch; what it returns (means over this process's share) is averaged and logged."""
        raise NotImplementedError

    def evaluate(self) -> dict[str, float]:
        """What is measured now and then."""
        raise NotImplementedError

    def conclude(self) -> dict[str, Any]:
        """What is measured once, at the end: numbers, and what figures need."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs beyond model, optimiser and random numbers."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        pass

    def share(self, *tensors: Tensor) -> list[Tensor]:
        """This process's rows of a batch that every process has drawn alike, on its device."""
        at, count = self.accelerator.process_index, self.accelerator.num_processes
        if len(tensors[0]) % count:
            raise ValueError(f"a batch of {len(tensors[0])} cannot be shared evenly by {count} processes")
        part = len(tensors[0]) // count
        return [tensor[at * part : (at + 1) * part].to(self.accelerator.device) for tensor in tensors]

    def close(self) -> None:
        """Give back what the task holds beyond memory, such as processes: the run is over, or cannot go on."""

    def learn(self, loss: Tensor, clip: float | None = None, norm: float | None = None) -> None:
        """One step of the optimiser; every number of a gradient is kept between -clip and clip, and all together no
        longer than norm."""
        self.optimiser.zero_grad()
        self.accelerator.backward(loss)
        if clip is not None:
            self.accelerator.clip_grad_value_(self.model.parameters(), clip)
        if norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), norm)
        self.optimiser.step()


@dataclass(frozen=True)
class Grid:
    """Values of one or more settings, to be tried together on held-out data at every combination of some axes.

    Attributes:
        over: the axes, and their values: the settings are chosen anew at every place on them.
        values: from a place on the axes to the values to try of each setting.
        fixed: other fields of the config.
        metric: what is measured, averaged over the `last` evaluations of a run.
        lower: whether lower is better.
        across: further axes; what is measured is averaged over them, as it is over the seeds.
        ladder: values are in order, and not all are tried: first three that are spread over them, of a setting with
            fewer than five the middle one; then those beside the best, until it has been better than its neighbours.
    """

    over: dict[str, tuple[Any, ...]]
    values: Callable[[dict[str, Any]], dict[str, tuple[Any, ...]]]
    fixed: dict[str, Any]
    metric: str
    lower: bool = False
    last: int = 1
    across: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    ladder: bool = False

    def settings(self) -> set[str]:
        """The names of what is chosen."""
        return {*self.values({name: values[0] for name, values in self.over.items()})}


@dataclass(frozen=True)
class Experiment:
    """An experiment of the papers.

    Attributes:
        name: in commands and folders; `experiments.CATALOGUE` says more of it.
        config: its dataclass, a `Config`.
        axes: what a sweep can cross with the seeds: fields of the config and their values.
        metrics: numbers that a finished run has: what rules and tuning may name.
        grids: settings that `neurocoder tune` chooses on held-out data.
        tuned: settings that another experiment's grids choose.
        main: of some axes, the values that a sweep takes unless told otherwise (None: what `fill` says); of the
            others it takes all.
        fill: from a config to what stands where one of its fields is None, by its budget and model.
        start: makes the task of a config whose fields are all filled in.
        figures, tables: from the distilled runs to what the report shows of them.
    """

    name: str
    config: type[Config]
    axes: dict[str, tuple[Any, ...]]
    fill: Callable[[Any], dict[str, Any]]
    start: Callable[[Any], Task]
    figures: Callable[[Any], list[Picture]]
    tables: Callable[[Any], list[Table]]
    main: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    grids: list[Grid] = field(default_factory=list)
    tuned: tuple[str, ...] = ()

    def resolve(self, config: Config) -> Config:
        """The config with every None filled in."""
        return replace(config, **{name: v for name, v in self.fill(config).items() if getattr(config, name) is None})

    def label(self, config: Config) -> str:
        """The name of a run's folder: its place on the axes, its budget, and what differs from that.

        Settings that are tuned are always in it: what they are by default changes with the tuning.
        """
        plain, full = self.resolve(self._plain(config)), self.resolve(config)
        parts = [str(getattr(full, name)) for name in self.axes] + [config.budget]
        tuned = {setting for grid in self.grids for setting in grid.settings()} - {*self.axes} | {*self.tuned}
        for name in (item.name for item in fields(full)):
            value = getattr(full, name)
            if name in tuned or (name != "seed" and value != getattr(plain, name)):
                parts.append(f"{name}-{value}")
        return re.sub(r"[^\w.+-]", "_", ".".join(parts))

    def _plain(self, config: Config) -> Config:
        return self.config(
            seed=config.seed, budget=config.budget, **{name: getattr(config, name) for name in self.axes}
        )


def as_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)
