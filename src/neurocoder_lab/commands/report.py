"""`neurocoder report`: one page of everything."""

from __future__ import annotations

from pathlib import Path

from neurocoder_lab.results import folder
from neurocoder_lab.signals import importing


def report(results: Path = folder(), out: Path = Path("report.html"), dirty: bool = False) -> None:
    """Write one self-contained page: claims, tables beside the papers', figures.

    Args:
        results: folder of results.
        out: the page.
        dirty: take in runs of uncommitted code.
    """
    with importing():
        from neurocoder_lab.report import write

    print(write(results, out, dirty))
