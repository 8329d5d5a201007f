"""Figures as SVG text for the report: its colours follow the page, light or dark."""

from __future__ import annotations

import io
import re
from itertools import cycle

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from neurocoder_lab.results import Curve

INK = "#123457"  # replaced by the colour of the page's text
COLOURS = ("#8a8f98", "#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9")  # safe for colour-blind eyes
DASHES = ("-", "--", "-.", (0, (1, 1)))
WIDTH = 7.2
SIDES = COLOURS[1], COLOURS[3]  # of a choice between two
LETTERS = str.maketrans("01", "AB")

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


def curves(named: dict[str, Curve], label: str, log: bool = True, over: str = "training steps") -> str:
    """One line a name, mean and a band of a standard deviation."""
    return panels({label: named}, log, over)


def panels(parts: dict[str, dict[str, Curve]], log: bool = False, over: str = "training steps", skip: int = 0) -> str:
    """Curves of the same names side by side, one panel for each label of the vertical axis.

    Args:
        skip: colours to leave to what is not shown; the first is for what is plain.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6 if len(parts) == 1 else 3.0))
        every = figure.subplots(1, len(parts), squeeze=False)[0]
        for axes, (label, named) in zip(every, parts.items(), strict=True):
            _lines(axes, named, log, skip)
            axes.set_xlabel(over)
            axes.set_ylabel(label)
            if axes.get_xlim()[1] > 1e6:  # otherwise a power of ten stands alone at the end of the axis
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        lines = every[0].get_legend_handles_labels()
        figure.legend(*lines, frameon=False, fontsize=9, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 0.88))
        figure.subplots_adjust(wspace=0.32)
        return svg(figure)


def _lines(axes: Axes, named: dict[str, Curve], log: bool, skip: int) -> None:
    for index, (name, (steps, means, stds)) in enumerate(named.items(), skip):
        colour, dash, few = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)], len(steps) <= 3
        axes.plot(steps, means, color=colour, label=name, linewidth=1.6, linestyle=dash, marker="o" if few else "")
        low, high = ([m + sign * s for m, s in zip(means, stds, strict=True)] for sign in (-1, 1))
        low = [max(value, 1e-9) for value in low] if log else low
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
    if log:
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(FuncFormatter(lambda value, place: f"{value:.3g}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def dots(
    named: dict[str, list[tuple[float, float] | None]],
    theirs: dict[str, list[tuple[float, float] | None]],
    places: list[str],
    label: str,
) -> str:
    """A row of means with standard deviations for each name, one at every place; the paper's hollow beside ours."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.4))
        axes, apart = figure.subplots(), min(0.24, 0.8 / len(named))
        for index, (name, colour) in enumerate(zip(named, COLOURS, strict=False)):
            for side, (values, hollow) in enumerate(((named[name], False), (theirs.get(name, []), True))):
                known = [(place, *value) for place, value in enumerate(values) if value is not None]
                if known:
                    x = [place + (index - (len(named) - 1) / 2) * apart + side * 0.09 for place, _, _ in known]
                    axes.errorbar(
                        x, [mean for _, mean, _ in known], [std for _, _, std in known], fmt="o", color=colour,
                        markerfacecolor="none" if hollow else colour, alpha=0.6 if hollow else 1, markersize=5,
                        elinewidth=1.2, label=f"{name}, paper" if hollow else name,
                    )  # fmt: skip
        axes.set_xticks(range(len(places)), places, fontsize=10 if len(places) < 7 else 8)
        axes.set_ylabel(label)
        axes.legend(frameon=False, fontsize=9, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return svg(figure)


def trade(
    named: dict[str, tuple[tuple[float, float], tuple[float, float]]],
    lines: dict[str, tuple[str, ...]],
    across: str,
    upwards: str,
) -> str:
    """One quantity against another: a point with two standard deviations and its name beside it for each; `lines` join
    those of which one thing changes by degrees."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.8))
        axes = figure.subplots()
        for (title, names), colour, style in zip(lines.items(), COLOURS[1:], cycle(DASHES), strict=False):
            met = [named[name] for name in names if name in named]
            if len(met) > 1:
                x, y = ([point[side][0] for point in met] for side in (0, 1))
                axes.plot(x, y, color=colour, linestyle=style, linewidth=1.3, label=title, zorder=1)
        for name, ((x, x_std), (y, y_std)) in named.items():
            joined = any(name in names for names in lines.values())
            axes.errorbar(
                x, y, y_std, x_std, fmt="o" if joined else "s", color=INK if joined else COLOURS[0],
                markersize=4, elinewidth=1,
            )  # fmt: skip
            axes.annotate(name, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
        axes.set_xlabel(across)
        axes.set_ylabel(upwards)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return svg(figure)


def reads(busiest: list[list[float]], common: list[list[float]], moved: list[float], elsewhere: list[float]) -> str:
    """Who reads the busiest slots; what each two tasks read in common; and how far what each read was moved since, and
    how much of it is read elsewhere now."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        parts = figure.subplot_mosaic("AA;BC", height_ratios=(2, 3))
        tasks = [str(task) for task in range(1, len(common) + 1)]
        slots = sorted(zip(*busiest, strict=True), key=lambda shares: (shares.index(max(shares)), -max(shares)))
        for name, table, aspect, label in (
            ("A", [*zip(*slots, strict=True)], "auto", "share of its reads"),
            ("B", common, "equal", "share of reads in common"),
        ):
            image = parts[name].imshow(table, cmap="cividis", vmin=0, vmax=1, aspect=aspect)
            parts[name].set_yticks(range(len(tasks)), tasks)
            parts[name].set(xlabel="task", ylabel="task")
            figure.colorbar(image, ax=parts[name], label=label)
        parts["A"].set_xlabel("slot, sorted by the task that reads it most")
        for row, shares in enumerate(common):
            for column, share in enumerate(shares):
                colour = "black" if share > 0.5 else "white"
                parts["B"].text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=8, color=colour)
        parts["B"].set_xticks(range(len(tasks)), tasks)
        for side, (values, name) in enumerate(((moved, "rows moved"), (elsewhere, "reads elsewhere"))):
            places = [task + (side - 0.5) * 0.38 for task in range(len(values))]
            parts["C"].bar(places, [100 * value for value in values], 0.36, color=COLOURS[1 + side], label=name)
        parts["C"].set_xticks(range(len(moved)), tasks[: len(moved)])
        parts["C"].set(xlabel="task", ylabel="changed by later tasks, %")
        parts["C"].legend(frameon=False, fontsize=8)
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


def over_time(examples: list[dict], names: list[str]) -> str:
    """What each step of some sequences uses of the programs; above, what the steps are for, which lines part.

    Args:
        examples: of each sequence, `use` (a row of shares a step) and `phases` (a number a step).
        names: of the phases, by number.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.7 * len(examples)), layout="constrained")
        highest, shades = max(max(map(max, example["use"])) for example in examples), []
        for axes, example in zip(figure.subplots(len(examples), 1, squeeze=False)[:, 0], examples, strict=True):
            columns, phases = [*zip(*example["use"], strict=True)], example["phases"]
            extent = (0.5, len(phases) + 0.5, len(columns) + 0.5, 0.5)
            look = {"cmap": "viridis", "vmin": 0, "vmax": highest, "interpolation": "nearest"}
            shades.append(axes.imshow(columns, aspect="auto", extent=extent, **look))
            starts = [step for step, phase in enumerate(phases) if step == 0 or phase != phases[step - 1]]
            for start, end in zip(starts, [*starts[1:], len(phases)], strict=True):
                axes.text((start + end) / 2 + 0.5, 0, names[phases[start]], rotation=60, fontsize=8)
                if start:
                    axes.axvline(start + 0.5, color="white", linewidth=1)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_ylabel("program")
        figure.axes[-1].set_xlabel("step of the sequence")
        figure.colorbar(shades[0], ax=figure.axes, label="share of use", pad=0.01)
        return svg(figure)


def attention_maps(named: dict[str, list], titles: list[str]) -> str:
    """A row of small maps for each name, one a title: slots downwards, components to the right."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.3 * len(named)), layout="constrained")
        for line, (name, maps) in zip(
            figure.subplots(len(named), len(titles), squeeze=False), named.items(), strict=True
        ):
            highest = max(max(map(max, map_)) for map_ in maps)
            slots, components = len(maps[0][0]), len(maps[0])
            shades = [
                axes.imshow([*zip(*map_, strict=True)], cmap="viridis", vmin=0, vmax=highest, aspect="auto",
                            interpolation="nearest", extent=(0.5, components + 0.5, slots + 0.5, 0.5))
                for axes, map_ in zip(line, maps, strict=True)
            ]  # fmt: skip
            for axes, title in zip(line, titles, strict=True):
                axes.set_title(title, fontsize=9)
                axes.set_xticks(range(1, components + 1))
                axes.set_yticks([1, slots] if axes is line[0] else [])
            line[0].set_ylabel(f"{name}\nslot")
            line[len(titles) // 2].set_xlabel("component")
            figure.colorbar(shades[0], ax=[*line], label="attention", pad=0.01)
        return svg(figure)


def patterns(named: dict[str, list]) -> str:
    """The two attention patterns of each component, side by side over the slots."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 2.2), layout="constrained")
        for axes, (name, pair) in zip(figure.subplots(1, len(named), sharey=True), named.items(), strict=True):
            places = range(1, len(pair[0]) + 1)
            for side, (weights, colour) in enumerate(zip(pair, SIDES, strict=True)):
                axes.step(places, weights, where="mid", color=colour, label=f"pattern {'AB'[side]}",
                          linestyle=("-", "--")[side])  # fmt: skip
            axes.set_title(name, fontsize=10)
            axes.set_xlabel("slot")
        figure.axes[0].set_ylabel("attention")
        figure.axes[0].set_ylim(bottom=0)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, ncols=2, loc="outside upper center"
        )
        return svg(figure)


def tree(leaves: list[list[int]]) -> str:
    """A binary tree from left to right, and of each class the share of its inputs that every leaf gets."""
    depth, classes = (len(leaves) - 1).bit_length(), len(leaves[0])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.42 * len(leaves) + 0.9), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2, 3))
        for level in range(depth):
            width = len(leaves) >> level
            for node in range(2**level):
                at = (node + 0.5) * width - 0.5
                for side, colour in enumerate(SIDES):
                    to = at + (side - 0.5) * width / 2
                    left.plot([level, level + 1], [at, to], color=colour, linewidth=1.6, linestyle=("-", "--")[side])
                left.plot(level, at, "o", color=INK, markersize=4)
            left.text(level + 0.5, -0.5, f"{level + 1}", ha="center", fontsize=9)
        for side, colour in enumerate(SIDES):
            left.plot([], [], color=colour, linestyle=("-", "--")[side], label=f"pattern {'AB'[side]}")
        left.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 0.0))
        left.set_title("component", fontsize=9, pad=14)
        left.set_ylim(len(leaves) - 0.5, -0.5)
        left.set_axis_off()
        totals = [max(sum(column), 1) for column in zip(*leaves, strict=True)]
        shares = [[100 * count / total for count, total in zip(row, totals, strict=True)] for row in leaves]
        image = right.imshow(shares, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        for leaf, row in enumerate(shares):
            for which, share in enumerate(row):
                if share >= 0.5:
                    right.text(which, leaf, f"{share:.0f}", ha="center", va="center", fontsize=8,
                               color="black" if share > 50 else "white")  # fmt: skip
        right.set_xticks(range(classes))
        right.set_xlabel("digit")
        right.set_yticks(
            range(len(leaves)), [format(leaf, f"0{depth}b").translate(LETTERS) for leaf in range(len(leaves))]
        )
        figure.colorbar(image, ax=right, label="share of the digit's images, %")
        return svg(figure)


def distributions(stages: dict[str, list]) -> str:
    """One band a stage, from top to bottom: inputs to the right, modules downwards, white where one is certain."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.85 * len(stages) + 0.5), layout="constrained")
        bands = figure.subplots(len(stages), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, rows) in zip(bands, stages.items(), strict=True):
            modules = len(rows[0])
            axes.imshow([*zip(*rows, strict=True)], cmap="gray", vmin=0, vmax=1, aspect="auto",
                        interpolation="nearest", extent=(0.5, len(rows) + 0.5, modules + 0.5, 0.5))  # fmt: skip
            axes.set_yticks([1, modules])
            axes.set_title(name, fontsize=9, loc="left", pad=3)
        bands[len(bands) // 2].set_ylabel("module")
        bands[-1].set_xlabel("word of the batch")
        figure.colorbar(bands[0].images[0], ax=[*bands], label="probability", pad=0.01)
        return svg(figure)


def paths(clusters: dict[str, dict[str, dict]]) -> str:
    """A row for each cluster, a column for each stage: modules as nodes, layers to the right.

    A stage has `nodes`, the share of the cluster's inputs that use a module of a layer, and `edges`, the share that
    goes from one to one of the next.
    """
    titles = [*next(iter(clusters.values()))]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.35 * len(clusters) + 0.6), layout="constrained")
        grid = figure.subplots(len(clusters), len(titles), squeeze=False, sharex=True, sharey=True)
        for line, (name, stages), colour in zip(grid, clusters.items(), COLOURS[1:], strict=False):
            for axes, stage in zip(line, stages.values(), strict=True):
                for layer, edges in enumerate(stage["edges"], 1):
                    for start, shares in enumerate(edges, 1):
                        for end, share in enumerate(shares, 1):
                            if share > 0.005:
                                axes.plot([layer, layer + 1], [start, end], color=colour, linewidth=7 * share,
                                          alpha=0.6, solid_capstyle="round", zorder=1)  # fmt: skip
                places = [(x, y, share) for x, row in enumerate(stage["nodes"], 1) for y, share in enumerate(row, 1)]
                xs, ys, shares = zip(*places, strict=True)
                axes.scatter(xs, ys, [110 * share for share in shares], color=INK, zorder=2, linewidths=0)
                axes.set_xlim(0.5, len(stage["nodes"]) + 0.5)
                axes.set_ylim(len(stage["nodes"][0]) + 0.5, 0.5)
                axes.set_xticks(range(1, len(stage["nodes"]) + 1))
                axes.set_yticks(range(1, len(stage["nodes"][0]) + 1))
            line[0].set_ylabel(f"{name}\nmodule", fontsize=9)
        for axes, title in zip(grid[0], titles, strict=True):
            axes.set_title(title, fontsize=9)
        for axes in grid[-1]:
            axes.set_xlabel("layer", fontsize=9)
        return svg(figure)
