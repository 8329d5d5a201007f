"""Compare layers at equal parameters on one task."""

import argparse
import time

import torch
from digits import TEST, accuracy, digits, train
from torch import nn

import neurocoder as nc

LAYERS = {
    "plain, wider": None,
    "Neurocoder": {"heads": 5},
    "mixture of experts": {"layer": nc.peers.MixtureOfExperts, "top_k": 2},
    "stored programs (NSM)": {"layer": nc.peers.StoredProgramMemory},
    "HyperNet": {"layer": nc.peers.HyperLinear},
    "FiLM": {"layer": nc.peers.FiLM},
}


def network(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each layer (default: %(default)s)")
    given = parser.parse_args()
    data, test = digits(8000, 0), digits(2000, 1, TEST)
    wanted = sum(p.numel() for p in network(128).parameters())
    print(f"{'':<24}{'parameters':>10}{'accuracy, %':>14}{'ms a step':>11}")
    for name, options in LAYERS.items():
        scores, began = [], time.perf_counter()
        for seed in range(given.seeds):
            torch.manual_seed(seed)
            model = network(128 if options is None else 32)
            if options is not None:
                nc.recode(model, "*", parameters=wanted, **options)
            train(model, *data, steps=given.steps, extra=lambda model=model: nc.auxiliary(model))
            scores.append(accuracy(model, *test))
        took = 1000 * (time.perf_counter() - began) / (given.seeds * given.steps)
        std, mean = torch.std_mean(torch.tensor(scores))
        print(
            f"{name:<24}{sum(p.numel() for p in model.parameters()):>10,}{mean:>9.1f} ± {std:.1f}{took:>11.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
