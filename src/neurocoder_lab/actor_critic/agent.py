"""What the trainers share: how an agent is measured, and what of it a resumed run needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from math import sqrt
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from neurocoder_lab.actor_critic.games import SKIP
from neurocoder_lab.actor_critic.inside import composed, programs
from neurocoder_lab.actor_critic.learning import RMSProp, Settings
from neurocoder_lab.actor_critic.playing import Player, play, seed_of
from neurocoder_lab.results import deviation
from neurocoder_lab.task import Task

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

TESTED, MEASURED = 1_000_003, 2_000_003  # seeds of the games now and then, and at the end: the same for every run


@dataclass(frozen=True)
class Work:
    """What there is to do; it can be sent to another process.

    Attributes:
        train, test: make so many environments, to learn in and to be measured in.
        settings: how to learn.
        steps: of the run, each of one rollout in every environment.
        evaluate_every: steps between evaluations.
        seed: of the games, and of the actions.
        environments: played at once; with workers, so many rollouts are a step of the run, whoever plays them.
        workers: of a3c.
        episodes: played when the agent is measured: now and then, and at the end.
    """

    train: Callable[[int], VectorEnv]
    test: Callable[[int], VectorEnv]
    settings: Settings
    steps: int
    evaluate_every: int
    seed: int
    environments: int = 16
    workers: int = 2
    episodes: tuple[int, int] = (5, 30)


class Agent(Task):
    """An agent that is measured and never learns: the random one. The trainers teach theirs.

    A run that was stopped goes on with the weights, the optimiser and the counts it had; its games begin anew.
    """

    def __init__(self, model: nn.Module, work: Work):
        self.rule = RMSProp(model.parameters(), work.settings)
        super().__init__(model, self.rule, work.steps, work.evaluate_every)
        self.work, self.played = work, 0  # steps of all environments
        self.earlier_scores: list[float] = []  # of the last episodes before the run was stopped

    def step(self, index: int) -> dict[str, Tensor]:
        return {}

    def now(self) -> nn.Module:
        """The agent as it is, to be measured."""
        return self.model

    def recent(self) -> list[float]:
        """True scores of the last episodes in training, of this process."""
        return []

    def evaluate(self) -> dict[str, float]:
        """Score: the mean of some episodes, the games always the same; in training: of the last, 0 before one ends."""
        scores, recent = self.scores(TESTED, self.work.episodes[0]), gather_object(self.recent())
        recent = recent or self.earlier_scores
        counts = {"environment_steps": self.played, "frames": SKIP * self.played}
        return {"score": mean(scores), "train_score": mean(recent) if recent else 0.0} | counts

    def conclude(self) -> dict[str, Any]:
        scores = self.scores(MEASURED, self.work.episodes[1])
        ending = {"score": mean(scores), "score_error": deviation(scores) / sqrt(len(scores)), "scores": scores}
        if composed(self.model):
            with closing(self.work.test(1)) as environment:
                ending |= programs(self.now(), self.measured(environment))
        return ending

    def scores(self, seed: int, episodes: int) -> list[float]:
        with closing(self.work.test(episodes)) as environments:
            return play(self.now(), Player(environments, seed, chance=self.chance(seed)))

    def measured(self, environment: VectorEnv) -> Player:
        """At the beginning of the first of the episodes that the run is measured by at its end."""
        return Player(environment, MEASURED, total=self.work.episodes[1], chance=self.chance(MEASURED))

    def chance(self, seed: int) -> int:
        """Seed of the actions in games of this seed: the run's own, or all random agents were the same."""
        return seed_of(seed, self.work.seed)

    def state(self) -> dict[str, Tensor]:
        recent = torch.tensor(self.recent() or self.earlier_scores, dtype=torch.float64)
        return {"played": torch.tensor(self.played), "scores": recent}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.played, self.earlier_scores = int(state["played"]), state["scores"].tolist()
