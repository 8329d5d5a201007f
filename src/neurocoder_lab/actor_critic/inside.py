"""Which programs an agent uses while it plays. Shapes: P programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab.actor_critic.playing import Player
from neurocoder_lab.attention import rounded

LAYERS = ("policy", "value")
SHOWN, EVERY = 400, 4  # steps of an episode to keep, one of so many


class Moment(NamedTuple):
    """A step of an episode."""

    use: dict[str, Tensor]  # by layer, the share of each program (P,), of M_U
    action: Tensor  # (1,)
    score: float  # before it
    lives: int


def composed(model: nn.Module) -> bool:
    """Whether policy and value are of programs."""
    return all(isinstance(getattr(model, name, None), nc.Linear) for name in LAYERS)


@torch.no_grad()
def watch(model: nn.Module, player: Player) -> Iterator[Moment]:
    """An episode in the player's one environment, step by step; each is told before it is taken."""
    over = False
    while not over:
        with nc.trace(model) as seen:
            action = player.act(model)
        use = {name: seen[name].use()["left"].flatten() for name in LAYERS}
        lives = 0 if player.lives_N is None else int(player.lives_N[0])
        yield Moment({name: share / share.sum() for name, share in use.items()}, action, player.score_N[0], lives)
        over = bool(player.step(action)[1])


def programs(model: nn.Module, player: Player) -> dict[str, Any]:
    """For a figure: what the policy uses in the beginning of an episode, and the lives it has."""
    moments = [moment for _, moment in zip(range(SHOWN), watch(model, player), strict=False)][::EVERY]
    use_TP = torch.stack([moment.use["policy"] for moment in moments]).cpu()
    return {"programs": [{"use": rounded(use_TP), "phases": [moment.lives for moment in moments]}]}
