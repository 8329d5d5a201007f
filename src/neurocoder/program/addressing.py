"""How a layer addresses its memory: which slots a component reads, and by what keys."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isqrt
from typing import Any

from torch import Tensor

from neurocoder.conditional import check_sizes
from neurocoder.functional import BANKS


@dataclass(frozen=True)
class Addressing:
    """What decides which slots are read.

    Attributes:
        top_k: slots that a component reads of each bank; None: all.
        one_choice: the slots, and their weights, are chosen once for the three banks, by keys of their own.
        fixed: queries and keys stay as they were drawn: they are buffers.
        product_keys: the key of slot i * n + j is the i-th of n first halves and the j-th of n second halves.
        sparse: gradients of what has one row a slot have the rows that were read, and no others.
    """

    top_k: int | None = None
    one_choice: bool = False
    fixed: bool = False
    product_keys: bool = False
    sparse: bool = False

    @property
    def banks(self) -> tuple[str, ...]:
        """What has keys and queries of its own."""
        return ("shared",) if self.one_choice else BANKS

    @property
    def free(self) -> bool:
        """Whether keys must be free: made of no slot."""
        return self.one_choice or self.fixed or self.product_keys or self.sparse

    def places(self, slots: Tensor, count: int) -> tuple[Tensor, ...]:
        """Which key each of these slots has, or which first and which second half."""
        if not self.product_keys:
            return (slots,)
        side = isqrt(count)
        return slots.div(side, rounding_mode="floor"), slots % side

    def options(self) -> dict[str, Any]:
        """As the constructors take them."""
        own = asdict(self)
        return own | {"addresses": "fixed" if own.pop("fixed") else "learned"}

    def __str__(self) -> str:
        """What differs from reading all slots by learned addresses, for a layer's `repr`."""
        default = Addressing().options()
        return "".join(f", {name}={value}" for name, value in self.options().items() if value != default[name])


def addressing(chosen: dict[str, Any]) -> Addressing:
    """The addressing that these options ask for, checked."""
    top_k, slots, key_dim = chosen["top_k"], chosen["slots"], chosen["key_dim"]
    flags = {name: chosen[name] for name in ("one_choice", "product_keys", "sparse")}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    if chosen["addresses"] not in ("learned", "fixed"):
        raise ValueError(f"addresses must be 'learned' or 'fixed', got {chosen['addresses']!r}")
    if top_k is None:
        wanting = [name for name, flag in flags.items() if flag]
        if wanting:
            raise ValueError(
                f"{wanting[0]}=True needs top_k=, the number of slots that a component reads, e.g. top_k=2"
            )
    else:
        check_sizes(top_k=top_k)
        if top_k > slots:
            raise ValueError(f"top_k must be at most slots={slots}, got {top_k}")
    if chosen["product_keys"]:
        _check_products(slots, key_dim)
    if top_k is not None and chosen["steps"] > 1 and chosen["least_used"]:
        raise ValueError("usage looks at every slot that nobody used: top_k needs least_used=0, or one step")
    if chosen["sparse"] and chosen["controller_sees"] == "read":
        raise ValueError("controller_sees='read' reads every slot: sparse=True needs controller_sees='input'")
    return Addressing(top_k=top_k, fixed=chosen["addresses"] == "fixed", **flags)


def _check_products(slots: int, key_dim: int) -> None:
    side = isqrt(slots)
    if side * side != slots:
        raise ValueError(
            f"product keys name n * n slots, and slots={slots} is no square; the nearest: {side**2}, {(side + 1) ** 2}"
        )
    if key_dim % 2:
        raise ValueError(f"product keys have two halves: key_dim must be even, got {key_dim}")
