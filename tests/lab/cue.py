"""A small game that takes a memory: a cue is seen once, then nothing, and in the end it must be named.

python -m tests.lab.cue FOLDER TRAINER STEPS    an experiment with it, in a process of its own
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

import neurocoder as nc
from neurocoder_lab.actor_critic.a3c import Asynchronous
from neurocoder_lab.actor_critic.agent import Work
from neurocoder_lab.actor_critic.learning import Settings
from neurocoder_lab.actor_critic.sync import Synchronous
from neurocoder_lab.networks import ActorCritic
from neurocoder_lab.run import execute
from neurocoder_lab.task import Config, Experiment

BLANK = 3  # steps between the cue and the question
TRAINERS = {"sync": Synchronous, "a3c": Asynchronous}


class Cue(gymnasium.Env):
    """Seen: the cue (-1 or 1) at first, and whether it is asked for. The answer counts 5; the learner sees 1 of it."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fail: bool = False):
        self.fail = fail

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.time = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        if self.fail:
            raise RuntimeError("the game broke")
        self.time += 1
        over = self.time > BLANK
        reward = 5.0 * (action == self.cue) if over else 0.0
        return np.array([0, self.time == BLANK], np.float32), reward, over, False, {}


def make(count: int, fail: bool = False) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Cue, fail)] * count, autoreset_mode=AutoresetMode.SAME_STEP)


@dataclass(frozen=True)
class CueConfig(Config):
    trainer: str = "sync"
    iterations: int | None = None
    hidden: int = 24
    rate: float = 0.02
    recoded: bool = False
    workers: int = 2
    fail: bool = False


def start(config: CueConfig):
    torso = nn.Sequential(nn.Linear(2, 16), nn.Tanh())
    model = ActorCritic(torso, 16, 2, config.hidden)
    if config.recoded:
        nc.recode(model, ["policy", "value"], slots=8, heads=4, key_dim=3, residual=True)
    settings = Settings(rollout=10, rate=config.rate, orthogonal=0.1 if config.recoded else 0.0)
    steps = config.iterations
    work = Work(partial(make, fail=config.fail), make, settings, steps, max(steps // 4, 1), config.seed,
                environments=8, workers=config.workers, episodes=(20, 100))  # fmt: skip
    return TRAINERS[config.trainer](model, work)


EXPERIMENT = Experiment(
    name="cue",
    config=CueConfig,
    axes={"trainer": tuple(TRAINERS)},
    fill=lambda config: {"iterations": 150},
    start=start,
    figures=lambda runs: [],
    tables=lambda runs: [],
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, trainer, steps = sys.argv[1:]
    execute(EXPERIMENT, CueConfig(trainer=trainer, iterations=int(steps)), Path(folder), checkpoint_seconds=0.2)
