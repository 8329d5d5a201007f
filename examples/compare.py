"""Compare layers at equal parameters on one task: accuracy, size and time in a table.

All networks learn digits for 600 steps and are tested on fonts that were not trained on. One is plain, 256-136-10. The
others are 256-32-10 with both layers re-coded by `nc.recode(model, "*", layer=..., parameters=...)`, which chooses
slots, experts, programs or hidden units such that they are as large as the first:

                            parameters   accuracy, %  ms a step
    plain, wider                36,322    82.9 ± 0.6        1.5
    Neurocoder                  36,430    84.3 ± 0.9        6.0
    mixture of experts          36,520    84.3 ± 1.3        5.8
    stored programs (NSM)       37,486    81.6 ± 0.4        4.1
    HyperNet                    36,586    83.3 ± 0.5        2.3
    FiLM                        36,314    82.4 ± 0.7        1.7

Mean and standard deviation of three seeds; time is that of the processor, one thread, for a whole step with Adam. Three
seeds do not tell layers apart that differ by a point; what the table does tell is the price of each at this size.
"""

import argparse
import time

import torch
from digits import TEST, accuracy, digits, train
from torch import Tensor, nn

import neurocoder as nc

WIDE = 136
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


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def learned(options: dict | None, seed: int, steps: int, data: tuple[Tensor, Tensor]) -> nn.Module:
    torch.manual_seed(seed)
    model = network(WIDE if options is None else 32)
    if options is not None:
        nc.recode(model, "*", parameters=size(network(WIDE)), **options)
    train(model, *data, steps=steps, extra=lambda: nc.auxiliary(model))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each layer (default: %(default)s)")
    given = parser.parse_args()
    if given.seeds < 1 or given.steps < 1:
        parser.error("--seeds and --steps must be at least 1")
    torch.set_num_threads(1)
    data, test = digits(8000, 0), digits(2000, 1, TEST)
    print(f"{'':<24}{'parameters':>10}{'accuracy, %':>14}{'ms a step':>11}")
    for name, options in LAYERS.items():
        began = time.process_time()
        models = [learned(options, seed, given.steps, data) for seed in range(given.seeds)]
        took = 1000 * (time.process_time() - began) / (given.seeds * given.steps)
        std, mean = torch.std_mean(
            torch.tensor([accuracy(model, *test) for model in models]), correction=int(given.seeds > 1)
        )
        print(f"{name:<24}{size(models[0]):>10,}{mean:>8.1f} ± {std:.1f}{took:>11.1f}", flush=True)


if __name__ == "__main__":
    main()
