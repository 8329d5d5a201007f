"""`neurocoder bench`: how fast, and how large."""

from __future__ import annotations

from pathlib import Path

from neurocoder_lab.signals import importing


def bench(
    repeats: int = 31,
    widths: tuple[int, ...] = (512, 1024, 2048, 4096),
    compiled: bool = False,
    out: Path | None = None,
) -> None:
    """Speed and memory of every layer against nn.Linear, as ratios; one thread.

    Args:
        repeats: rounds; the figure is the median.
        widths: of the square program-memory layers.
        compiled: also torch.compile (takes minutes).
        out: also write the ratios to this JSON file.
    """
    with importing():
        from neurocoder_lab.bench import measure

    measure(repeats, [*widths], compiled, out)
