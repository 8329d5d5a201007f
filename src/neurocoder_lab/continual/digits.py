"""Split MNIST: five two-way tasks of digits padded to 32 x 32, and the plain network that learns them.

The network is 1024-h-h-outputs without bias in the hidden layers, as the authors'; in the task scenario every task has
an output layer of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder_lab.continual.stream import MultiHead, Scenario
from neurocoder_lab.networks import mlp
from neurocoder_lab.tuning import best

TASKS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
PIXELS = 0.1000, 0.2752  # mean and standard deviation
BATCH = 128
EPOCHS = {"smoke": 3, "desk": 4, "paper": 4}
EXAMPLES = {"smoke": 256, "desk": 60_000, "paper": 60_000}
NEUROCODER: dict[str, Any] = {"slots": 50, "heads": 10, "key_dim": 5}  # one step: the least_used = 5 would do nothing
PAPER = {"sharpness": 1.0, "orthogonal": 10.0}
# strengths of the penalties in the benchmark that the paper follows (Hsu et al. 2018)
BENCHMARK: dict[str, dict[str, float]] = {
    "task": {"l2": 0.01, "si": 300.0, "ewc": 100.0, "oewc": 400.0},
    "domain": {"l2": 0.5, "si": 3000.0, "ewc": 100.0, "oewc": 700.0},
}


def chosen_form(scenario: Scenario) -> dict[str, float]:
    """Sharpness and weight of the orthogonal loss as held-out data chose them; before that, the paper's."""
    one_head = "domain" if scenario == "class" else scenario  # both have one
    return {name: best("split-mnist", name, scenario=one_head) or value for name, value in PAPER.items()}


def prepare(x: Tensor) -> Tensor:
    return F.pad(x, (2, 2, 2, 2)).flatten(1).float().div_(255).sub_(PIXELS[0]).div_(PIXELS[1])


def network(scenario: Scenario, hidden: int) -> nn.Module:
    body = nn.Sequential(*mlp(1024, hidden, hidden, bias=False), nn.ReLU())
    if scenario == "task":
        return MultiHead(body, [nn.Linear(hidden, len(classes)) for classes in TASKS])
    outputs = 2 if scenario == "domain" else sum(map(len, TASKS))
    return nn.Sequential(*body, nn.Linear(hidden, outputs))
