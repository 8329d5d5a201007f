"""Playing: an agent in environments that go on from rollout to rollout, and whole episodes to measure it by.

Shapes: T steps of a rollout, N environments, A actions.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab.actor_critic.learning import Rollout
from neurocoder_lab.networks import State

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

RECENT = 100  # episodes whose mean is the score in training


def seed_of(*numbers: int) -> int:
    """A seed of its own for every combination of numbers, with room for the environments that count on from it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 2)


class Player:
    """Environments, and where an agent is in each; actions are drawn by a generator of its own.

    Args:
        environments: that begin anew in the step in which they end.
        seed: of the environments, counting on.
        first, total: of how many environments these are, beginning with which: however many players share them, each
            environment has the same chances.
        chance: seed of the actions, if not the same.
    """

    def __init__(
        self,
        environments: VectorEnv,
        seed: int,
        first: int = 0,
        total: int | None = None,
        chance: int | None = None,
    ):
        self.environments = environments
        self.generator = torch.Generator().manual_seed(seed if chance is None else chance)
        self.ours, self.total = slice(first, first + environments.num_envs), total or environments.num_envs
        seen, about = environments.reset(seed=seed + first)
        self.seen_N, self.lives_N = torch.from_numpy(seen), about.get("lives")
        self.fresh_N = torch.ones(len(self.seen_N), dtype=torch.bool)
        self.state: State | None = None
        self.score_N = np.zeros(len(self.seen_N))
        self.scores: deque[float] = deque(maxlen=RECENT)  # true ones, of the last episodes that ended

    def act(self, model: nn.Module) -> Tensor:
        """What the agent does now, (N,), drawn from its policy."""
        device = next(model.parameters()).device
        logits_1NA, _, self.state = model(self.seen_N[None].to(device), self.state, self.fresh_N[None].to(device))
        drawn_N1 = torch.rand(self.total, 1, generator=self.generator)[self.ours]
        below_NA = logits_1NA[0].float().softmax(-1).cumsum(-1).cpu()
        return torch.searchsorted(below_NA[:, :-1].contiguous(), drawn_N1, right=True).squeeze(-1)

    def step(self, action_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take these actions: rewards, whether the episode is over, and whether a life is lost in one that goes on."""
        seen, reward, ended, cut, about = self.environments.step(action_N.numpy())
        over, lives = ended | cut, about.get("lives")
        lost = np.zeros_like(over) if lives is None else (lives < self.lives_N) & ~over
        self.score_N += reward
        self.scores.extend(self.score_N[over].tolist())
        self.score_N[over] = 0
        self.seen_N, self.fresh_N, self.lives_N = torch.from_numpy(seen), torch.from_numpy(over), lives
        return torch.from_numpy(np.asarray(reward, np.float32)), self.fresh_N, torch.from_numpy(lost)

    @torch.no_grad()
    def rollout(self, model: nn.Module, steps: int) -> Rollout:
        """Play on for so many steps."""
        device = next(model.parameters()).device
        before, rows = self.state, []
        with nc.cached(model):
            for _ in range(steps):
                seen_N, fresh_N = self.seen_N, self.fresh_N
                action_N = self.act(model)
                rows.append((seen_N, action_N, *self.step(action_N), fresh_N))
            _, last_1N, _ = model(self.seen_N[None].to(device), self.state, self.fresh_N[None].to(device))
        seen, action, reward, over, lost, fresh = (torch.stack(column).to(device) for column in zip(*rows, strict=True))
        return Rollout(seen, action, reward, fresh, over, lost, before, last_1N[0])


@torch.no_grad()
def play(model: nn.Module, player: Player) -> list[float]:
    """The true scores of the first episode in each environment; the player's seeds fix them."""
    score_N, going_N = np.zeros(len(player.seen_N)), np.ones(len(player.seen_N), dtype=bool)
    with nc.cached(model):
        while going_N.any():
            reward_N, over_N, _ = player.step(player.act(model))
            score_N += np.where(going_N, reward_N.numpy(), 0)
            going_N &= ~over_N.numpy()
    return score_N.tolist()
