"""The trainer `sync`: one learner plays all environments at once, spread over processes and machines by accelerate."""

from __future__ import annotations

from accelerate import Accelerator
from torch import Tensor

from neurocoder_lab.actor_critic.agent import Agent
from neurocoder_lab.actor_critic.learning import Rollout, loss
from neurocoder_lab.actor_critic.playing import Player, seed_of
from neurocoder_lab.errors import LabError


class Synchronous(Agent):
    """A step of the run is a rollout in every environment, and one update from all of them."""

    player: Player | None = None

    def attach(self, accelerator: Accelerator) -> None:
        count, processes = self.work.environments, accelerator.num_processes
        if count % processes:
            raise LabError(f"{count} environments cannot be shared evenly by {processes} processes")
        super().attach(accelerator)

    def step(self, index: int) -> dict[str, Tensor]:
        self.rule.anneal(self.work.settings.rate_at(index / self.steps))
        return self.improve(self.collect(index))

    def collect(self, index: int) -> Rollout:
        """Play on in this process's environments; the first time, begin."""
        if self.player is None:
            count = self.work.environments // self.accelerator.num_processes
            first, seed = count * self.accelerator.process_index, seed_of(self.work.seed, index)
            self.player = Player(self.work.train(count), seed, first, self.work.environments)
        self.played += self.work.environments * self.work.settings.rollout
        return self.player.rollout(self.model, self.work.settings.rollout)

    def improve(self, rollout: Rollout) -> dict[str, Tensor]:
        total, parts = loss(self.network, rollout, self.work.settings)
        # a sum over all processes, whose gradients are averaged
        self.learn(self.accelerator.num_processes * total, norm=self.work.settings.norm)
        return parts

    def recent(self) -> list[float]:
        return [] if self.player is None else [*self.player.scores]

    def close(self) -> None:
        if self.player is not None:
            self.player.environments.close()
