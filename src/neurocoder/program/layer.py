"""A layer that applies what it composes: what `Linear` and `Conv2d` share.

Shapes: see `neurocoder.functional`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from neurocoder.program.composer import Composer
from neurocoder.program.composition import Composition
from neurocoder.program.initialise import add_nothing, initialise, start_as
from neurocoder.records import Attention


class ProgramLayer(Composer):
    """A layer that composes its weights from a program memory. Use `Linear` or `Conv2d`; `Linear` says what each
    argument means."""

    def __init__(
        self, shape: tuple[int, ...], own_features: int, bias: bool, options: Mapping[str, Any], factory: dict
    ):
        super().__init__(shape, own_features, bias, options, factory)
        initialise(self, memory_too=options.get("memory") is None)

    def reset_parameters(self) -> None:
        """Initialise anew, the memory included."""
        initialise(self, memory_too=True)

    def adopt(self, base: nn.Linear | nn.Conv2d) -> None:
        """Add to `base` what is composed: y = base(x) + x P_t, which equals base(x) until M_V is trained.

        The caller freezes the base once it stands in the network.
        """
        self.base = base
        add_nothing(self)

    def become(self, old: nn.Linear | nn.Conv2d) -> None:
        """Start as `old` for every input, where there is a residual program to hold what the memory does not."""
        start_as(self, old)

    def composition(self, x: Tensor, control: Tensor | None = None) -> Composition:
        """The programs of the inputs in factored form."""
        raise NotImplementedError

    def dense(
        self, core: Tensor, residual: Tensor | None, banks: tuple[Tensor, Tensor] | None = None, based: bool = True
    ) -> Tensor:
        """The dense working programs (..., I, O) of coordinates (..., P, P) in the memories, or in these `banks`, and
        multipliers of the residual program (...), with the base's weight if there is one."""
        dense = self.composed(core, banks)
        if residual is not None:
            dense = dense + residual[..., None, None] * self.residual.flatten(1).t()
        return dense if self.base is None or not based else dense + self.base.weight.flatten(1).t()

    def _note(self, composition: Composition, lead: tuple[int, ...]) -> None:
        """Record a call with the leading shape of its control."""
        if not self.watched:
            return
        *attention, sigma_RN, residual_N, slots_MkRN = composition
        left, right, values = (a.permute(2, 1, 0).reshape(*lead, *a.shape[1::-1]) for a in attention)
        sigma = sigma_RN.t().reshape(*lead, len(sigma_RN))
        residual = None if residual_N is None else residual_N.reshape(lead)
        chosen = None if slots_MkRN is None else by_input(slots_MkRN, lead)
        self.record(Attention(left, right, values, sigma, residual, chosen))


def by_input(slots_MkRN: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Slots that are read, one place an input: (*lead, 3, R, k)."""
    slots_NMRk = slots_MkRN.expand(3, -1, -1, -1).permute(3, 0, 2, 1)
    return slots_NMRk.reshape(*lead, *slots_NMRk.shape[1:])
