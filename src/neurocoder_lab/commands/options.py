"""Options that several commands have."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from neurocoder_lab.provenance import Precision

RUNS = Path("runs")


@dataclass(frozen=True)
class Engine:
    """How to run, whatever the experiment."""

    runs: Path = RUNS
    """Folder of all runs: each has <experiment>/<name>/seed-N in it, and goes on there if it was stopped."""
    checkpoint_seconds: float = 30.0
    """Time between checkpoints."""
    precision: Precision = "no"
    """Mixed precision."""


def option(name: str, kind: Any, default: Any, told: str) -> tuple[str, Any, Any]:
    """A field of a dataclass whose fields depend on the experiment."""
    return name, Annotated[kind, tyro.conf.arg(help=told)], field(default=default)


def flat(name: str, settings: Any) -> tuple[str, Any, Any]:
    """The fields of a dataclass, as options without a prefix."""
    return name, tyro.conf.OmitArgPrefixes[type(settings)], field(default=settings)


def axes(values: dict[str, tuple[Any, ...]], defaults: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any, Any]]:
    """An option for each axis: which of its values."""
    options = []
    for name, some in values.items():
        default, told = defaults.get(name, some), "Which of them."
        if None in default:
            some, told = (*some, None), "Which of them; None: as budget and other settings have it."
        options.append(option(name, tuple[Literal[some], ...], default, told))
    return options
