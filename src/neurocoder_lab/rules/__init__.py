"""How every claim of both papers, and every one of ours, is judged: which experiment decides it, and by what."""

from __future__ import annotations

from neurocoder_lab.rules import modular, neurocoder, ours
from neurocoder_lab.rules.rule import LEVEL, Rule, Verdict

__all__ = ["COUNTED", "LEVEL", "Rule", "Verdict", "rules"]

COUNTED = {  # results that are no experiment's, and what they measure
    "parameters": ("parameters", "paper", "away"),
    "speed": ("step_ratio", "milliseconds", "parameters", "time_steps"),
}


def rules() -> dict[str, Rule]:
    """The rule of every claim, by its id."""
    return neurocoder.rules() | modular.rules() | ours.rules()
