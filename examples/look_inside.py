"""See which stored programs the classes of a task use: a table, and a heat map for each layer.

A network of two re-coded layers with twelve slots each learns ten digits (81% on fonts that were not trained on).
`nc.diagnose` then tells how inputs use the slots. It prints, in part:

    layer  kind       bank    inputs  parts  entropy  of batch  at most  most used                    dead
    0      nc.Linear  left    2000    12     1.75     2.30      2.48     1 (0.19) 4 (0.18) 6 (0.15)   0
    2      nc.Linear  left    2000    12     1.30     1.84      2.48     11 (0.38) 1 (0.26) 5 (0.10)  0
    2      nc.Linear  values  2000    12     0.81     0.81      2.48     4 (0.49) 2 (0.49) 9 (0.00)   10: 0 1 3 5 6 ...

One input attends to fewer slots than all inputs together (entropy 1.30 against 1.84 in the last layer), so programs
differ; of the singular values that layer uses two, for every input alike. With `by=labels` the same is told of each
class, which is what the picture shows: some digits share slots, such as 1, 2, 3 and 7 slot 1 of the last layer.
"""

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
