"""The experiments by name; one file each, imported when it is asked for."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from neurocoder_lab.store import LabError
from neurocoder_lab.task import Experiment

NAMES = ("polynomial", "mnist-linear", "cifar", "split-mnist", "split-cifar", "forgetting")


def get(name: str) -> Experiment:
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1, cutoff=0.0)
        raise LabError(f"no experiment is called {name!r}; did you mean {near[0]}? All: {', '.join(NAMES)}")
    return import_module(f"neurocoder_lab.experiments.{name.replace('-', '_')}").EXPERIMENT


def every() -> list[Experiment]:
    return [get(name) for name in NAMES]
