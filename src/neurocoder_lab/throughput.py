"""Speed of the agents that play Atari: frames a second, and the learner's step.

    neurocoder bench atari [--repeats 31] [--out FILE]

One thread for the emulators and one for the learner, which wait for each other: all on one core. Seaquest, the
convolutions of A3C, 16 environments, rollouts of 20 steps (1,280 frames). A round plays a rollout with random actions
and nothing else, and takes a step of the trainer `sync` with each agent; figures are of medians over the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from accelerate import Accelerator

from neurocoder_lab.actor_critic import games
from neurocoder_lab.actor_critic.games import ABOUT, SKIP
from neurocoder_lab.actor_critic.learning import Settings
from neurocoder_lab.actor_critic.sync import Synchronous
from neurocoder_lab.bench import WARM, interleave, record, table
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments.atari import EXPERIMENT, NAMES, Atari, start

AGENTS = ("a3c", "hypernet", "neurocoder")


def at_random(count: int) -> Callable[[], float]:
    """A function that times a rollout with random actions: all that the emulators can give."""
    environments, chance = games.make("seaquest", 0.0, count), np.random.default_rng(0)
    actions = ABOUT["seaquest"].actions
    environments.reset(seed=0)

    def step() -> float:
        begin = time.perf_counter()
        for _ in range(Settings.rollout):
            environments.step(chance.integers(actions, size=count))
        return time.perf_counter() - begin

    return step


def stepper(task: Synchronous, learning: list[float]) -> Callable[[], float]:
    """A function that times a step of the run, and notes the learner's part of it."""

    def step() -> float:
        begin = time.perf_counter()
        rollout = task.collect(0)
        between = time.perf_counter()
        task.improve(rollout)
        end = time.perf_counter()
        learning.append(1e3 * (end - between))
        return end - begin

    return step


def figures(repeats: int, environments: int = 16) -> dict[str, dict[str, float]]:
    """Frames a second of every agent, over those at random, over the plain agent's; and the learner's step."""
    accelerator, learning = Accelerator(cpu=True), {NAMES[name]: [] for name in AGENTS}
    contestants = {"at random": at_random(environments)}
    for name in AGENTS:
        task = start(EXPERIMENT.resolve(Atari(model=name, environments=environments)))
        task.attach(accelerator)
        contestants[NAMES[name]] = stepper(task, learning[NAMES[name]])
    times = interleave(contestants, repeats)
    frames = environments * Settings.rollout * SKIP
    rates = {name: 1e3 * frames / milliseconds for name, milliseconds in times.items()}
    steps = {name: median(some[WARM:]) for name, some in learning.items()}

    def over(values: dict[str, float], base: str) -> dict[str, float]:
        return {name: round(value / values[base], 3) for name, value in values.items() if name != base}

    plain = NAMES["a3c"]
    return {
        "frames a second": {name: round(rate) for name, rate in rates.items()},
        "frames a second over those with random actions": over(rates, "at random"),
        "frames a second over the plain agent's": over({name: rates[name] for name in steps}, plain),
        "the learner's step over the plain agent's": {f"{plain} ms": round(steps[plain], 1)} | over(steps, plain),
    }


def measure(repeats: int, out: Path | None) -> None:
    """Print every figure, and write them where `out` says."""
    if repeats < 1:
        raise LabError(f"repeats must be at least 1, got --repeats {repeats}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = figures(repeats)
    print("Seaquest, trainer sync, 16 environments, rollouts of 20 steps (1,280 frames), one thread")
    print(table(rows))
    if out is not None:
        record(out, rows, repeats=repeats)
