"""The program memory: everything that has one row a slot, and the networks that name the slots."""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor, nn

from neurocoder.functional import Rules, orthogonality_loss
from neurocoder.precision import full_precision
from neurocoder.program.addressing import Addressing


class ProgramMemory(nn.Module):
    """Singular programs {M_U, M_V, M_S} with their keys (Eq. 10) and the gates of their slots (Eq. 14).

    Layers of equal shape may share one: `nc.Linear(..., memory=other.memory)`.

    Args:
        in_features, out_features: lengths of a left and a right singular vector.
        slots: rows of each bank (P in the paper).
        key_dim: length of a key (K in the paper).
        gate_features: width of what the slot gates look at; 0: there are no gates.
        rules: `free_keys` and `key_columns` decide what belongs to a slot.
        addressing: what keys there are.

    Attributes:
        left (slots, in_features), right (slots, out_features), values (slots,): the banks.
        gate_weight (3, slots, gate_features), gate_bias (3, slots): in the order of the banks; None without gates.
    """

    left_columns: nn.Parameter | None
    right_columns: nn.Parameter | None
    gate_weight: nn.Parameter | None
    gate_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        slots: int,
        key_dim: int = 5,
        gate_features: int = 0,
        rules: Rules = Rules(),
        addressing: Addressing = Addressing(),
        device=None,
        dtype=None,
    ):
        super().__init__()
        for name, size in {
            "in_features": in_features,
            "out_features": out_features,
            "slots": slots,
            "key_dim": key_dim,
        }.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.in_features, self.out_features, self.slots = in_features, out_features, slots
        self.key_dim, self.gate_features, self.rules, self.addressing = key_dim, gate_features, rules, addressing

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self._hold_banks(empty(slots, in_features), empty(slots, out_features), empty(slots, 1))
        for bank, width in zip(addressing.banks, (in_features, out_features, 1), strict=False):
            free = bank in rules.free_keys or addressing.free
            self._hold_keys(bank, empty(*self._key_shape()) if free else None)
            self.register_parameter(f"{bank}_key_weight", None if free else empty(key_dim, width))
            self.register_parameter(f"{bank}_key_bias", None if free else empty(key_dim))
        columns = rules.key_columns
        self.register_parameter("left_columns", empty(slots, key_dim) if columns else None)
        self.register_parameter("right_columns", empty(slots, key_dim) if columns else None)
        self.register_parameter("gate_weight", empty(3, slots, gate_features) if gate_features else None)
        self.register_parameter("gate_bias", empty(3, slots) if gate_features else None)

    @property
    def column(self) -> Tensor:
        """`values` as (slots, 1)."""
        return self.values[:, None]

    def _key_shape(self) -> tuple[int, ...]:
        """Of free keys: product keys are two halves of the root of as many as there are slots."""
        return (2, isqrt(self.slots), self.key_dim // 2) if self.addressing.product_keys else (self.slots, self.key_dim)

    def _hold_banks(self, left: nn.Parameter, right: nn.Parameter, values: nn.Parameter) -> None:
        self.left, self.right, self.values = left, right, nn.Parameter(values.detach()[:, 0])

    def _hold_keys(self, bank: str, keys: nn.Parameter | None) -> None:
        if keys is not None and self.addressing.fixed:
            self.register_buffer(f"{bank}_keys", keys.detach())
        else:
            self.register_parameter(f"{bank}_keys", keys)

    def free_keys(self, bank: str) -> Tensor | None:
        """Keys of one bank that no network makes."""
        return getattr(self, f"{bank}_keys")

    def keys(self) -> Tensor:
        """Keys of all slots (Eq. 10): (3, slots, key_dim), (1, slots, key_dim) where there is one choice for the three
        banks. Product keys are (3, 2, root of slots, key_dim / 2). Cheap, so they are made anew in every forward."""
        return torch.stack([self.bank_keys(bank) for bank in self.addressing.banks])

    def bank_keys(self, bank: str) -> Tensor:
        """Keys of one bank."""
        free = self.free_keys(bank)
        if free is not None:
            return free
        slots, weight, bias = (getattr(self, f"{bank}{part}") for part in ("", "_key_weight", "_key_bias"))
        if bank == "values":  # a map of one number
            return torch.addcmul(bias, slots[:, None], weight[:, 0])
        return nn.functional.linear(slots, weight, bias)

    def orthogonal_banks(self) -> tuple[Tensor, Tensor]:
        """What the orthogonal loss (Eq. 5) looks at: the left and the right bank, with key columns if there are any."""
        if self.left_columns is None or self.right_columns is None:
            return self.left, self.right
        return torch.cat((self.left, self.left_columns), 1), torch.cat((self.right, self.right_columns), 1)

    def auxiliary(self) -> dict[str, Tensor]:
        """What is to be added to the loss: the orthogonal loss of both banks (Eq. 5), unless gradients are sparse: it
        would move every row."""
        if self.addressing.sparse:
            return {"orthogonality": self.left.new_zeros(())}
        with full_precision(self.left):
            left, right = (orthogonality_loss(bank) for bank in self.orthogonal_banks())
            return {"orthogonality": left + right}

    def check_serves(self, wanted: ProgramMemory, like: Tensor) -> None:
        """Raise unless a layer of such parameters that would build `wanted` can use this memory instead."""
        if (self.left.dtype, self.left.device) != (like.dtype, like.device):
            raise ValueError(
                f"the given memory is {self.left.dtype} on {self.left.device}; "
                f"this layer is {like.dtype} on {like.device}"
            )
        names = ("in_features", "out_features", "slots", "key_dim", "gate_features", "rules", "addressing")
        if any(getattr(self, name) != getattr(wanted, name) for name in names):
            raise ValueError(
                f"the given memory has {self.extra_repr()}; "
                f"this layer needs {wanted.extra_repr()}, made by the same rules"
            )

    def extra_repr(self) -> str:
        gates = f"gates over {self.gate_features} features" if self.gate_features else "no gates"
        size = f"{self.slots} slots of {self.in_features}x{self.out_features}, key_dim={self.key_dim}"
        return f"{size}, {gates}{self.addressing}"


class SparseMemory(ProgramMemory):
    """A memory whose gradients have the rows that were read, and no others.

    Each thing of one row a slot lies in an `nn.Embedding`: so `DistributedDataParallel` knows that its gradient is
    sparse. `left`, `right` and `values` are what they hold.
    """

    left_rows: nn.Embedding
    right_rows: nn.Embedding
    values_rows: nn.Embedding

    @property
    def left(self) -> Tensor:
        return self.left_rows.weight

    @property
    def right(self) -> Tensor:
        return self.right_rows.weight

    @property
    def values(self) -> Tensor:
        return self.values_rows.weight[:, 0]

    @property
    def column(self) -> Tensor:
        return self.values_rows.weight

    def _hold_banks(self, left: nn.Parameter, right: nn.Parameter, values: nn.Parameter) -> None:
        self.left_rows, self.right_rows, self.values_rows = map(_rows, (left, right, values))

    def _hold_keys(self, bank: str, keys: nn.Parameter | None) -> None:
        if keys is None or self.addressing.fixed or self.addressing.product_keys:
            super()._hold_keys(bank, keys)
        else:
            self.add_module(f"{bank}_keys_rows", _rows(keys))

    def free_keys(self, bank: str) -> Tensor | None:
        held = self._modules.get(f"{bank}_keys_rows")
        return held.weight if isinstance(held, nn.Embedding) else super().free_keys(bank)


def _rows(weight: nn.Parameter) -> nn.Embedding:
    return nn.Embedding(*weight.shape, sparse=True, _weight=weight)
