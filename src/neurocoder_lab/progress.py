"""Progress with time left, rate and the latest numbers; silent where nobody looks."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PAUSE = 0.2  # seconds between looks at the clock's hands


class Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, title: str, total: int, done: int = 0, quiet: bool = False):
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = Bar(*columns, console=console, disable=quiet or not console.is_terminal, transient=True)
        self._task = self._bar.add_task(title, total=total, completed=done, note="")
        self._start, self._done, self._shown = time.monotonic(), done, 0.0

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, done: int, numbers: dict[str, float] | None = None, note: str = "") -> None:
        now = time.monotonic()
        if self._bar.disable or now - self._shown < PAUSE:
            return
        self._shown = now
        rate = (done - self._done) / max(now - self._start, 1e-9)
        text = " ".join(f"{name} {value:.4g}" for name, value in (numbers or {}).items())
        self._bar.update(self._task, completed=done, note=f"{rate:.1f}/s {text} {note}")
