"""A tiny experiment for the engine's tests: every kind of state a run can have, and quick."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.modular.training import ViterbiEM, gaussian
from neurocoder_lab.task import Config, Experiment, Task


@dataclass(frozen=True)
class Toy(Config):
    model: str = "em"
    iterations: int | None = None
    pause: float = 0.0
    fail: bool = False


class ToyTask(Task):
    def __init__(self, config: Toy):
        model = nn.Sequential(nc.modular.Linear(4, 3, modules=3), nn.Dropout(0.2), nn.BatchNorm1d(3))
        super().__init__(model, torch.optim.Adam(model.parameters(), lr=0.01), config.iterations, 7)
        self.x, self.y, self.config = torch.randn(64, 4), torch.randn(64, 3), config
        self.em = ViterbiEM(model, gaussian(), size=64, samples=2)

    def step(self, index: int) -> dict[str, Tensor]:
        if self.config.fail:
            raise RuntimeError("this one always fails")
        time.sleep(self.config.pause)
        chosen = torch.randint(64, (16,))
        if index % 5 == 0:
            self.em.expect(self.x[chosen], self.y[chosen], chosen)
        loss = self.em.loss(self.x[chosen], self.y[chosen], chosen)
        self.learn(loss)
        return {"loss": loss}

    def evaluate(self) -> dict[str, float]:
        return {"error": F.mse_loss(self.model(self.x), self.y).item()}

    def state(self) -> dict[str, Tensor]:
        return self.em.state_dict()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.em.load_state_dict(state)


EXPERIMENT = Experiment(
    name="toy",
    config=Toy,
    axes={"model": ("em", "other")},
    fill=lambda config: {"iterations": 60},
    start=ToyTask,
    figures=lambda runs: [],
    tables=lambda runs: [],
)
