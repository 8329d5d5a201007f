"""In what precision, and on what kind of tensor, a computation runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import log

import torch
from torch import Tensor

BITS = 1 / log(2)  # what is to be exponentiated is taken to base 2: on a CPU exp2 takes a third to a half of exp's time


def full_precision(x: Tensor) -> AbstractContextManager:
    """No autocast inside: attention is never computed in half precision."""
    return torch.autocast(x.device.type, enabled=False) if autocasting(x) else nullcontext()


def autocasting(x: Tensor) -> bool:
    """Whether autocast is in force where x lives."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def in_memory(tensor: Tensor) -> bool:
    """Whether the tensor has memory of its own to write to; one that stands for a batch of others has not."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True
