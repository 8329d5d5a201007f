"""How the claims of our own are judged."""

from __future__ import annotations

from neurocoder_lab.evidence import Bound, Compare, Group
from neurocoder_lab.rules.rule import Rule, no_larger
from neurocoder_lab.tuning import best

PAPER = 73.97  # the best of Table 4 of Neurocoder with any method: online EWC
FEWEST = 10  # seeds


def rules() -> dict[str, Rule]:
    chosen = best("large-memory", "variant", dataset="mnist") or "sparse"
    mine, *others = (
        Group({"variant": variant, "scenario": "domain", "method": "adam", "dataset": "mnist"}, "accuracy")
        for variant in (chosen, "mlp", "moe", "peer")
    )
    note = f"Of the variants, held-out data prefer {chosen}"
    return {
        "ours-large-memory-kept": Rule(
            "large-memory",
            tuple(Compare(mine, other) for other in others),
            given=tuple(no_larger(mine.where, other.where, share=1.1) for other in others),
            fewest=FEWEST,
            note=note,
        ),
        "ours-large-memory-paper": Rule("large-memory", (Bound(mine, PAPER),), fewest=FEWEST, note=note),
    }
