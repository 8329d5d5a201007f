"""How the claims of our own are judged."""

from __future__ import annotations

from neurocoder_lab.continual.large_memory import chosen
from neurocoder_lab.evidence import Bound, Compare, Group
from neurocoder_lab.rules.rule import Rule, no_larger

PAPER = 73.97  # the best of Table 4 of Neurocoder with any method: online EWC
KEPT, LEARNED = 70.0, 95.0  # what one setting shall do: after the last task, and of all classes at once
FEWEST = 10  # seeds


def rules() -> dict[str, Rule]:
    variant = chosen()
    note = f"Of the variants of its size, held-out data prefer {variant}; each has a rate of its own"

    def group(variant: str, scenario: str = "domain", method: str = "adam") -> Group:
        where = {"variant": variant, "scenario": scenario, "method": method, "dataset": "mnist"}
        return Group(where, "accuracy")

    def rule(*tests: Bound | Compare, **more) -> Rule:
        return Rule("large-memory", tests, fewest=FEWEST, note=note, **more)

    mine = group(variant)
    small, large = ([*map(group, names)] for names in (("linear", "features", "winners"), ("mlp", "moe", "peer")))
    return {
        "ours-large-memory-kept": rule(
            *(Compare(mine, other) for other in (*small, *large)),
            given=tuple(no_larger(mine.where, other.where, share=1.1) for other in large),
        ),
        "ours-large-memory-paper": rule(Bound(mine, PAPER), beside=(*small, large[0])),
        "ours-large-memory-trade": rule(Bound(mine, KEPT), Bound(group(variant, "joint"), LEARNED)),
        "ours-large-memory-methods": rule(*(Compare(group(variant, method=name), mine) for name in ("oewc", "si"))),
    }
