"""What conditional layers record of a call: a kind of record for each kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


class Record:
    """What one call of a layer did with each of its inputs: a frozen dataclass of tensors (None: there is none).

    Every field begins with the leading shape of what the layer looked at, one place an input.
    """

    def use(self) -> Tensor | dict[str, Tensor]:
        """How much each input used each part of what the layer stores, (..., parts), none below 0: what `diagnose`
        looks at. Where there are banks of parts, one such tensor a bank, all of one shape."""
        raise NotImplementedError

    def rows(self) -> Record:
        """The same with one leading dimension, the inputs."""
        use = self.use()
        lead = (next(iter(use.values())) if isinstance(use, dict) else use).shape[:-1]
        return self._map(lambda value: value.reshape(lead.numel(), *value.shape[len(lead) :]))

    def where(self, mask: Tensor) -> Record:
        """The inputs for which the mask is true; its shape begins that of every field."""
        return self._map(lambda value: value[mask])

    def _map(self, change: Callable[[Tensor], Tensor]) -> Record:
        return type(self)(**{name: None if value is None else change(value) for name, value in vars(self).items()})

    def __repr__(self) -> str:
        shapes = (f"{name} {tuple(value.shape)}" for name, value in vars(self).items() if value is not None)
        return f"{type(self).__name__}({', '.join(shapes)})"


def combined(records: Sequence[Record], how: Callable[[list[Tensor]], Tensor]) -> Record:
    """One record of several of one kind: each field is `how` (`torch.stack`, `torch.cat`) of theirs."""
    fields = {name: [vars(record)[name] for record in records] for name in vars(records[0])}
    return type(records[0])(**{name: None if values[0] is None else how(values) for name, values in fields.items()})


def shares(use: Tensor) -> Tensor:
    """Normalised to sum to 1 over the parts: gated attention does not, nor do scales."""
    return use / use.sum(-1, keepdim=True).clamp_min(1e-12)


@dataclass(frozen=True, repr=False)
class Attention(Record):
    """What one call of a program-memory layer attended to; the leading dimensions are those of its control.

    Attributes:
        left, right, values: attention to the three banks, (..., components, slots). Gated attention does not sum to 1.
        sigma: the singular values, (..., components), positive and strictly decreasing (ascending where the rules say).
        residual: multiplier of the residual program, (...); None if the layer has none.
        chosen: with `top_k`, the slots that each component reads of each bank, (..., 3, components, top_k).
    """

    left: Tensor
    right: Tensor
    values: Tensor
    sigma: Tensor
    residual: Tensor | None
    chosen: Tensor | None = None

    def use(self) -> dict[str, Tensor]:
        banks = {"left": self.left, "right": self.right, "values": self.values}
        return {bank: shares(attention).mean(-2) for bank, attention in banks.items()}


@dataclass(frozen=True, repr=False)
class Mixture(Record):
    """How one call of a mixture of experts or a stored-program memory weighed what it stores.

    Attributes:
        weights: (..., parts), summing to 1; 0 for an expert that was not computed.
        chosen: the experts that were computed, (..., top_k); None where all programs are.
    """

    weights: Tensor
    chosen: Tensor | None

    def use(self) -> Tensor:
        return self.weights


@dataclass(frozen=True, repr=False)
class Choice(Record):
    """What one call of a modular layer chose.

    Attributes:
        probability: of each module, for each choice, (..., choices, modules).
        chosen: the modules it used, (..., choices, 1); several where it mixed them, (..., choices, mixed).
    """

    probability: Tensor
    chosen: Tensor

    def use(self) -> Tensor:
        return self.probability.mean(-2)


@dataclass(frozen=True, repr=False)
class Modulation(Record):
    """How one call of a HyperNet scaled its inputs, or of a FiLM scaled and shifted its outputs.

    Attributes:
        scale: (..., features).
        shift: (..., features); None for a HyperNet.
    """

    scale: Tensor
    shift: Tensor | None

    def use(self) -> Tensor:
        return self.scale.abs()


@dataclass(frozen=True, repr=False)
class Reading(Record):
    """What one call of a low-rank layer read of its inputs; none of it decides what the layer computes.

    Attributes:
        strength: the length of what each component added to the output, (..., rank).
    """

    strength: Tensor

    def use(self) -> Tensor:
        return self.strength
