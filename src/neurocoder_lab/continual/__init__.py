"""Continual learning on any `nn.Module`: streams of tasks, methods against forgetting, and what to measure.

docs/guides/continual.md shows it on a stream of your own.
"""

from neurocoder_lab.continual.fisher import fisher
from neurocoder_lab.continual.methods import EWC, L2, SI, Method, OnlineEWC, make
from neurocoder_lab.continual.metrics import accuracies, summary
from neurocoder_lab.continual.stream import MultiHead, Stream, split

__all__ = [
    "EWC",
    "L2",
    "SI",
    "Method",
    "MultiHead",
    "OnlineEWC",
    "Stream",
    "accuracies",
    "fisher",
    "make",
    "split",
    "summary",
]
