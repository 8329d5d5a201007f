"""Stored neural programs for PyTorch: layers that compose their weights anew for every input."""

from neurocoder.functional import Rules
from neurocoder.layers import Conv2d, Linear
from neurocoder.memory import ProgramMemory
from neurocoder.trace import Attention, Trace, trace
