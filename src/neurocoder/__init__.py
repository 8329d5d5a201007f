"""Stored neural programs for PyTorch: layers that compose their weights anew for every input."""

from neurocoder import functional
from neurocoder.checkpoint import load, save
from neurocoder.functional import Rules
from neurocoder.inspect import Diagnosis, diagnose, freeze, orthogonality
from neurocoder.layers import Conv2d, Linear
from neurocoder.memory import ProgramMemory
from neurocoder.recode import recode
from neurocoder.trace import Attention, Trace, trace

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "Conv2d",
    "Diagnosis",
    "Linear",
    "ProgramMemory",
    "Rules",
    "Trace",
    "diagnose",
    "freeze",
    "functional",
    "load",
    "orthogonality",
    "recode",
    "save",
    "trace",
]
