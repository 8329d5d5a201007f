"""Figures as SVG text for the report: its colours follow the page, light or dark."""

from __future__ import annotations

import io
import re

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK = "#123457"  # replaced by the colour of the page's text
COLOURS = ("#8a8f98", "#3d8bd4", "#1aa39a", "#e0902f", "#d4493d", "#9b5fc0", "#7a9a2e")
WIDTH = 7.2

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "neurocoder",
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    **{f"{name}.color": INK for name in ("text", "xtick", "ytick")},
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
}


def svg(figure: Figure) -> str:
    """The figure as an <svg> element that scales with the page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    body = text.getvalue()
    body = body[body.index("<svg") :].replace(INK, "currentColor")
    body = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)


def curves(
    named: dict[str, tuple[list[int], list[float], list[float]]],
    label: str,
    log: bool = True,
    over: str = "training steps",
) -> str:
    """One line a name, mean and a band of a standard deviation."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6))
        axes = figure.subplots()
        for (name, (steps, means, stds)), colour in zip(named.items(), COLOURS, strict=False):
            axes.plot(steps, means, color=colour, label=name, linewidth=1.6)
            low = [max(m - s, 1e-9) for m, s in zip(means, stds, strict=True)]
            axes.fill_between(
                steps, low, [m + s for m, s in zip(means, stds, strict=True)], color=colour, alpha=0.2, lw=0
            )
        if log:
            axes.set_yscale("log")
            for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                axis(FuncFormatter(lambda value, place: f"{value:.3g}"))
        axes.set_xlabel(over)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=9, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return svg(figure)


def dots(
    named: dict[str, list[tuple[float, float] | None]],
    theirs: dict[str, list[tuple[float, float] | None]],
    places: list[str],
    label: str,
) -> str:
    """A row of means with standard deviations for each name, one at every place; the paper's hollow beside ours."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.4))
        axes = figure.subplots()
        for index, (name, colour) in enumerate(zip(named, COLOURS, strict=False)):
            for side, (values, hollow) in enumerate(((named[name], False), (theirs.get(name, []), True))):
                known = [(place, *value) for place, value in enumerate(values) if value is not None]
                if known:
                    x = [place + (index - (len(named) - 1) / 2) * 0.24 + side * 0.09 for place, _, _ in known]
                    axes.errorbar(
                        x, [mean for _, mean, _ in known], [std for _, _, std in known], fmt="o", color=colour,
                        markerfacecolor="none" if hollow else colour, alpha=0.6 if hollow else 1, markersize=5,
                        elinewidth=1.2, label=f"{name}, paper" if hollow else name,
                    )  # fmt: skip
        axes.set_xticks(range(len(places)), places)
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=9, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return svg(figure)


def attention(example: dict) -> str:
    """Attention over slots and time, and below it prediction and truth; dashed lines part the chunks."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2))
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        weights = [*zip(*example["attention"], strict=True)]
        points = len(example["attention"])
        upper.imshow(
            weights, aspect="auto", cmap="viridis", interpolation="nearest", extent=(0, points, len(weights), 0)
        )
        upper.set_ylabel("slot")
        times = [t + 0.5 for t in range(points)]
        lower.plot(times[: len(example["y"])], example["y"], color="#3d8bd4", label="y")
        lower.plot(times, example["prediction"], color="#e0902f", label="prediction")
        lower.legend(frameon=False, fontsize=9, ncols=2)
        lower.set_xlabel("point of the sequence")
        for axes in (upper, lower):
            for chunk in range(1, example["chunks"]):
                axes.axvline(chunk * points / example["chunks"], color="#2fbf4f", linestyle="--", linewidth=1)
        return svg(figure)
