"""Modular Networks: layers that choose K of a pool of M modules for every input, and how they are trained."""

from neurocoder.modular import training
from neurocoder.modular.gru import GRU
from neurocoder.modular.layers import Conv2d, Linear

__all__ = ["GRU", "Conv2d", "Linear", "training"]
