"""What the papers, and the logs that their authors published, say: every claim, and every number we compare with.

claims.json has each claim with its id, where it stands, its words, and the numbers given for it.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

Spread = tuple[float, float]  # mean and standard deviation

# final accuracies in the logs of the authors' runs of Split MNIST, 400 hidden units, by scenario and method
LOGS: dict[tuple[str, str], dict[str, Spread]] = {
    ("domain", "adam"): {"mlp": (53.38, 1.39), "neurocoder": (57.07, 0.45)},
    ("domain", "adagrad"): {"mlp": (56.16, 1.79), "neurocoder": (60.60, 0.49)},
    ("domain", "ewc"): {"mlp": (56.88, 2.18), "neurocoder": (62.56, 1.07)},
    ("domain", "oewc"): {"mlp": (59.64, 3.13), "neurocoder": (71.79, 2.04)},
    ("domain", "l2"): {"mlp": (63.27, 3.94)},
}


@cache
def published() -> list[dict[str, Any]]:
    """The claims and the papers' numbers."""
    return json.loads((files("neurocoder_lab") / "claims.json").read_text())


def numbers(claim: str) -> dict[str, Any]:
    """The paper's numbers for a claim; none where no such claim is made."""
    return next((known["paper"] for known in published() if known["id"] == claim), {})


def spreads(claim: str) -> dict[str, Spread]:
    """Mean and standard deviation of every model that a claim's table has; none where no such claim is made."""
    paper = numbers(claim)
    return {model: (paper[model], std) for model, std in paper.get("std", {}).items()}
