"""What SIGTERM and ctrl-C do: while packages are imported, while a run trains, and to the processes of a sweep."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

from neurocoder_lab.errors import AT_ONCE, INTERRUPTED


@contextmanager
def importing() -> Iterator[None]:
    """Ctrl-C ends the process at once: as an exception, packages that are being imported swallow it, or break."""

    def leave(number: int, frame: Any) -> None:
        print(AT_ONCE, file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with handling(leave, signal.SIGINT) if ours else nullcontext():
        yield


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or ctrl-C has asked to stop; a second ctrl-C stops at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    with handling(note, signal.SIGTERM, signal.SIGINT):
        yield lambda: bool(asked)


def end_with(alive: Connection) -> None:
    """Let this process end, by SIGTERM, with the one that holds the other end of the pipe, however that dies."""

    def watch() -> None:
        alive.poll(None)  # nothing is ever sent: it returns when the other end is closed
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """The signals are handled so in the block, and ignored ones also in processes that are started in it."""
    try:
        before = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:  # not the main thread: whoever started it handles signals
        before = {}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
