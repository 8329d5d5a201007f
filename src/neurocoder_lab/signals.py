"""What SIGTERM and ctrl-C do while a run trains, and to the processes of a sweep."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or ctrl-C has asked to stop; a second ctrl-C stops at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever started it handles signals
        before = {}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ignoring(number: signal.Signals) -> Iterator[None]:
    """Processes that are started in the block ignore the signal."""
    try:
        before = signal.signal(number, signal.SIG_IGN)
    except ValueError:  # not the main thread
        before = None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(number, before)
