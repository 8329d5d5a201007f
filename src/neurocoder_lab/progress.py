"""Progress with time left, rate and the latest numbers: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PAUSE = 0.2  # seconds between looks at the clock's hands
LINES = 60.0  # seconds between lines of a log
FIXED = 50  # characters for bar, count and times; the title and the numbers share the rest


class Progress:
    """A bar on a terminal; elsewhere a line a minute, nothing for what takes less."""

    def __init__(self, title: str, total: int, done: int = 0, quiet: bool = False):
        self._console, self._quiet = Console(stderr=True), quiet
        room = max(self._console.width - FIXED, 0)
        short, self._room = title[: room // 2], room - min(len(title), room // 2)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        bar = self._console.is_terminal
        self._bar = Bar(*columns, console=self._console, disable=quiet or not bar, transient=True)
        self._task = self._bar.add_task(short, total=total, completed=done, note="")
        self._title, self._total, self._done = title, total, done
        self._start = time.monotonic()
        self._shown, self._pause = (0.0, PAUSE) if bar else (self._start, LINES)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, done: int, numbers: dict[str, float] | None = None, note: str = "") -> None:
        now = time.monotonic()
        if self._quiet or now - self._shown < self._pause:
            return
        self._shown = now
        rate = (done - self._done) / max(now - self._start, 1e-9)
        text = " ".join(f"{name} {value:.4g}" for name, value in (numbers or {}).items())
        if self._bar.disable:
            left = timedelta(seconds=round((self._total - done) / rate)) if rate else "unknown"
            line = f"{self._title} {done}/{self._total}, {left} left {text} {note}".rstrip()
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)
        else:
            self._bar.update(self._task, completed=done, note=f"{rate:.1f}/s {text} {note}"[: self._room])
