"""See which stored programs the classes of a task use: a table, and a heat map for each layer."""

import argparse

import torch
from digits import TEST, accuracy, digits, train
from matplotlib.figure import Figure
from torch import nn

import neurocoder as nc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="of training (default: %(default)s)")
    parser.add_argument("--out", default="look_inside.png", help="where to save the picture (default: %(default)s)")
    given = parser.parse_args()
    torch.manual_seed(0)
    x, labels = digits(2000, 1, TEST)
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    nc.recode(model, "*", slots=12, heads=3)
    train(model, *digits(8000, 0), steps=given.steps, extra=lambda: nc.auxiliary(model))
    print(f"accuracy on other fonts: {accuracy(model, x, labels):.1f}%\n")

    report = nc.diagnose(model, x, by=labels)
    print(nc.diagnose(model, x))
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), report, strict=True):
        share = torch.stack([100 * report.by[digit][name].usage[0] for digit in range(10)])
        drawn = axes.imshow(share, cmap="viridis", vmin=0)
        axes.set(title=f"layer {name}", xlabel="slot of the left memory", ylabel="digit")
        axes.set(xticks=range(12), yticks=range(10))
        figure.colorbar(drawn, label="share of attention, %", shrink=0.8)
    figure.savefig(given.out, dpi=150)
    print(f"\nsaved {given.out}")


if __name__ == "__main__":
    main()
