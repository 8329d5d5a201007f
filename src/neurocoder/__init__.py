"""Stored neural programs for PyTorch: layers that compose their weights anew for every input."""

from neurocoder import functional, modular, peers
from neurocoder.auxiliary import auxiliary, orthogonality
from neurocoder.checkpoint import load, save
from neurocoder.conditional import Conditional, register
from neurocoder.diagnosis import Diagnosis, Report, diagnose
from neurocoder.functional import Rules
from neurocoder.optimiser import SparseAdam
from neurocoder.parameters import split_parameters
from neurocoder.program import Conv2d, Linear, ProgramMemory, cached, freeze
from neurocoder.recode import recode
from neurocoder.records import Attention, Choice, Mixture, Modulation, Reading, Record
from neurocoder.sizing import sizes
from neurocoder.trace import Trace, controlled, trace

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "Choice",
    "Conditional",
    "Conv2d",
    "Diagnosis",
    "Linear",
    "Mixture",
    "Modulation",
    "ProgramMemory",
    "Reading",
    "Record",
    "Report",
    "Rules",
    "SparseAdam",
    "Trace",
    "auxiliary",
    "cached",
    "controlled",
    "diagnose",
    "freeze",
    "functional",
    "load",
    "modular",
    "orthogonality",
    "peers",
    "recode",
    "register",
    "save",
    "sizes",
    "split_parameters",
    "trace",
]
