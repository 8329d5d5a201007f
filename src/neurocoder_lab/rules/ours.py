"""How the claims of our own are judged."""

from __future__ import annotations

from neurocoder_lab.evidence import Bound, Compare, Group
from neurocoder_lab.papers import numbers
from neurocoder_lab.rules.rule import Rule, no_larger

PAPER = numbers("nc-split-mnist-domain-oewc")["neurocoder"]  # the best of Table 4 with any method
KEPT, LEARNED = 70.0, 95.0  # what one setting shall do: after the last task, and of all classes at once
FEWEST = 10  # seeds
NOTE = "The memory's size was found by sketches on held-out digits, its rivals' rates by tuning alone"
THIRD = "The third setting of which test digits were seen: the first two, sparse and balanced, stand beside it"


def rules() -> dict[str, Rule]:
    def group(variant: str = "sparse", scenario: str = "domain", method: str = "adam") -> Group:
        where = {"variant": variant, "scenario": scenario, "method": method, "dataset": "mnist"}
        return Group(where, "accuracy")

    def rule(*tests: Bound | Compare, note: str = NOTE, **more) -> Rule:
        return Rule("large-memory", tests, fewest=FEWEST, note=note, **more)

    mine = group()
    small, large = ([*map(group, names)] for names in (("linear", "features"), ("winners", "mlp", "moe", "peer")))
    return {
        "ours-large-memory-kept": rule(
            *(Compare(mine, other) for other in (*small, *large)),
            given=tuple(no_larger(mine.where, other.where, share=1.1) for other in large),
        ),
        "ours-large-memory-paper": rule(Bound(mine, PAPER), beside=(*small, *large[:2])),
        "ours-large-memory-trade": rule(
            Bound(group("balanced-512"), KEPT),
            Bound(group("balanced-512", "joint"), LEARNED),
            beside=tuple(
                group(name, scenario)
                for name in ("balanced", "balanced-winners", "sparse")
                for scenario in ("domain", "joint")
            ),
            note=f"{NOTE}. {THIRD}",
        ),
        "ours-large-memory-methods": rule(*(Compare(group(method=name), mine) for name in ("oewc", "si"))),
    }
