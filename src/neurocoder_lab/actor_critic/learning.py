"""What an actor-critic learns from a rollout: n-step returns, the loss, and A3C's RMSProp.

Shapes: T steps of a rollout, N environments, A actions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import neurocoder as nc
from neurocoder_lab.networks import State


@dataclass(frozen=True)
class Settings:
    """How an agent learns. "Mnih" is Mnih et al. 2016, Asynchronous Methods for Deep Reinforcement Learning; "by
    letter", what its first author told the writer of async-rl (github.com/muupan/async-rl/wiki).

    Attributes:
        discount: of a reward that comes a step later (Mnih, section 8 of the supplementary).
        rollout: steps between updates. Mnih has 5; public A3C agents with an LSTM have 20 (universe-starter-agent).
        entropy: weight of the policy's entropy (Mnih, section 8).
        value: weight of the squared error of the values (by letter: their gradients are multiplied by 0.5).
        rate: of RMSProp; it falls to zero with the steps (by letter: 7e-4; Mnih draws it anew for every run).
        decay: of RMSProp's mean of squares (Mnih, section 8).
        epsilon: of RMSProp, under the root (by letter).
        norm: the longest gradient of all parameters (universe-starter-agent; Mnih says nothing of one).
        clip: rewards count as -1, 0, 1 or what lies between (Mnih et al. 2015; by letter).
        lives: whether nothing that comes after the loss of a life counts before it (Mnih et al. 2015).
        orthogonal: weight of the orthogonal loss of program memories (a in Neurocoder's Table 5), once a rollout.
    """

    discount: float = 0.99
    rollout: int = 20
    entropy: float = 0.01
    value: float = 0.5
    rate: float = 7e-4
    decay: float = 0.99
    epsilon: float = 0.1
    norm: float = 40.0
    clip: float = 1.0
    lives: bool = True
    orthogonal: float = 0.0

    def rate_at(self, share: float) -> float:
        """The rate when this share of the training is done."""
        return self.rate * max(1 - share, 0.0)


class Rollout(NamedTuple):
    """What was seen and done in some steps of some environments."""

    seen_TN: Tensor
    action_TN: Tensor
    reward_TN: Tensor  # as the game gives it
    fresh_TN: Tensor  # an episode begins with this step
    over_TN: Tensor  # an episode ends with this step
    lost_TN: Tensor  # a life is lost in this step, and the episode goes on
    state: State | None  # of the LSTM before the first step
    last_N: Tensor  # the value of what comes after the last step


def returns(reward_TN: Tensor, end_TN: Tensor, last_N: Tensor, discount: float) -> Tensor:
    """R_t = r_t + discount R_{t+1}, without the latter where something ends with step t; behind the last, its value."""
    following_N, backwards = last_N, []
    for reward_N, end_N in zip(reward_TN.flip(0), end_TN.flip(0), strict=True):
        following_N = reward_N + discount * torch.where(end_N, 0.0, following_N)
        backwards.append(following_N)
    return torch.stack(backwards[::-1])


def loss(network: nn.Module, rollout: Rollout, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """Mnih's Algorithm S3, summed over the steps of all environments, as if each were a worker; and means, to log."""
    logits_TNA, value_TN, _ = network(rollout.seen_TN, rollout.state, rollout.fresh_TN)
    end_TN = rollout.over_TN | rollout.lost_TN if settings.lives else rollout.over_TN
    reward_TN = rollout.reward_TN.clamp(-settings.clip, settings.clip)
    return_TN = returns(reward_TN, end_TN, rollout.last_N, settings.discount)
    advantage_TN = return_TN - value_TN.detach()
    log_TNA = F.log_softmax(logits_TNA, -1)
    chosen_TN = log_TNA.gather(-1, rollout.action_TN[..., None]).squeeze(-1)
    parts = {
        "policy_loss": -(chosen_TN * advantage_TN).mean(),
        "value_loss": (return_TN - value_TN).square().mean(),
        "entropy": -(log_TNA.exp() * log_TNA).sum(-1).mean(),
    }
    of_step = parts["policy_loss"] + settings.value * parts["value_loss"] - settings.entropy * parts["entropy"]
    total = of_step * value_TN.numel()
    if settings.orthogonal:
        total = total + settings.orthogonal * nc.orthogonality(network) * value_TN.shape[1]
    return total, {"loss": of_step.detach()} | {name: part.detach() for name, part in parts.items()}


class RMSProp(Optimizer):
    """g <- decay g + (1 - decay) d^2, p <- p - rate d / sqrt(g + epsilon): equations 8 and 9 of Mnih et al. 2016.

    torch's adds epsilon behind the root. The squares are there from the start, so that processes can share them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], settings: Settings):
        super().__init__(parameters, {"lr": settings.rate, "decay": settings.decay, "epsilon": settings.epsilon})
        for parameter in self.parameters():
            self.state[parameter]["square"] = torch.zeros_like(parameter)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def anneal(self, rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    square = self.state[parameter]["square"].mul_(group["decay"])
                    square.addcmul_(parameter.grad, parameter.grad, value=1 - group["decay"])
                    parameter.addcdiv_(parameter.grad, (square + group["epsilon"]).sqrt_(), value=-group["lr"])
