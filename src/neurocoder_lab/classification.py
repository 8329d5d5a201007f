"""Labelled images as a task of the run engine: batches in random order, and accuracy after every pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder_lab.data import Examples
from neurocoder_lab.task import Config, Task

PIXELS = {  # mean and standard deviation of each channel
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
AT_ONCE = 500  # images in one forward when measuring


@dataclass(frozen=True)
class ImageConfig(Config):
    """Settings that every classification of images has."""

    epochs: int | None = None
    """Passes over the training images."""
    examples: int | None = None
    """Training images, at most: the first of those that are not held out."""
    rate: float | None = None
    """Learning rate: by default as chosen on held-out data, a usual one until then."""
    measure: Literal["test", "validation"] = "test"
    """validation: measure on every tenth training image, and do not train on those."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("epochs", "examples")
        self.check_positive("rate")


def normalise(
    x: Tensor, mean: tuple[float, ...], std: tuple[float, ...], layout: torch.memory_format = torch.contiguous_format
) -> Tensor:
    """Images of bytes as numbers around zero, channel by channel."""
    centre, scale = (torch.tensor(values)[:, None, None].mul(255) for values in (mean, std))
    return x.to(torch.float32, memory_format=layout).sub_(centre).div_(scale)


class Classifier(Task):
    """Learns to tell images apart: cross-entropy, and what the conditional layers want added to it.

    Args:
        prepare: from images of bytes to what the network takes; of training images, `augment` comes first.
        schedule: from the share of training that is done, 0 to 1, to the factor on the learning rate; by default it
            falls linearly to zero, which makes the last epoch depend less on chance.
        tested: how many images to measure on: the first of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        data: Examples,
        config: ImageConfig,
        batch: int,
        prepare: Callable[[Tensor], Tensor],
        *,
        schedule: Callable[[float], float] = lambda done: 1 - done,
        augment: Callable[[Tensor], Tensor] = lambda x: x,
        tested: int | None = None,
    ):
        (x, y), (test_x, test_y) = data.parts(config.measure)
        self.x, self.y = x[: config.examples], y[: config.examples]
        self.test = test_x[:tested], test_y[:tested]
        self.batch = min(batch, len(self.y))
        self.epoch_steps = len(self.y) // self.batch  # what is left of an epoch is not trained on
        super().__init__(model, optimiser, config.epochs * self.epoch_steps, self.epoch_steps)
        self.measure, self.prepare, self.augment = config.measure, prepare, augment
        self.rate, self.schedule = config.rate, schedule
        self.fingerprint = data.fingerprint
        self.order = torch.zeros(0, dtype=torch.long)

    def step(self, index: int) -> dict[str, Tensor]:
        place = index % self.epoch_steps
        if place == 0:
            self.order = torch.randperm(len(self.y))
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * self.schedule(index / self.steps)
        return self.train_on(index, self.order[place * self.batch : (place + 1) * self.batch])

    def images(self, rows: Tensor) -> list[Tensor]:
        """This process's share of some training images, their labels, and their places."""
        return self.share(self.prepare(self.augment(self.x[rows])), self.y[rows], rows)

    def train_on(self, index: int, rows: Tensor) -> dict[str, Tensor]:
        """Step number `index`, on these training images."""
        x, y, _ = self.images(rows)
        logits = self.network(x)
        loss = F.cross_entropy(logits, y)
        self.learn(loss + nc.auxiliary(self.model))
        return {"loss": loss, "train": 100 * (logits.argmax(-1) == y).float().mean()}

    def logits(self, images: Tensor | None = None) -> Tensor:
        """Of images of bytes; by default of those to measure on."""
        images, device = self.test[0] if images is None else images, self.accelerator.device
        return torch.cat([self.model(self.prepare(x).to(device)).cpu() for x in images.split(AT_ONCE)])

    def evaluate(self) -> dict[str, float]:
        """Accuracy in percent."""
        return {self.measure: 100 * (self.logits().argmax(-1) == self.test[1]).float().mean().item()}

    def state(self) -> dict[str, Tensor]:
        return {"order": self.order}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.order = state["order"]
