"""CIFAR-10 and CIFAR-100 (Table 2 of Neurocoder, Table 3 of its later appendix): three networks, plain and conditional.

    neurocoder run cifar --network mlp --model neurocoder
    neurocoder tune cifar
    neurocoder sweep cifar --seeds 3 --network mlp
    neurocoder sweep cifar --seeds 3 --network lenet --precision bf16
    neurocoder sweep cifar --seeds 1 --network densenet --precision bf16
    neurocoder sweep cifar --seeds 1 --network densenet --depth 100 --precision bf16

All layers of the MLP are re-coded, and the output layer of LeNet and DenseNet, as in the paper. MLP and LeNet learn by
Adam without augmentation, at a rate that is chosen on held-out data and falls linearly to zero; DenseNet as its own
paper has it (SGD at 0.1, a tenth of it after half and three quarters, shifted and mirrored images), at the desk with 40
layers instead of 100 and on the first 10,000 images. With 100 layers the desk takes 20 steps, to see that it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder_lab import data, figures, networks
from neurocoder_lab.classification import PIXELS, Classifier, ImageConfig, normalise
from neurocoder_lab.errors import LabError
from neurocoder_lab.papers import numbers
from neurocoder_lab.results import Runs, spread
from neurocoder_lab.task import Experiment, Grid, Picture, Table
from neurocoder_lab.tuning import best

Network = Literal["mlp", "lenet", "densenet"]
Dataset = Literal["cifar10", "cifar100"]
Model = Literal[
    "original", "low-rank", "moe", "nsm", "neurocoder", "recommended", "moe-all-dense", "nsm-all-dense"
]  # fmt: skip
NETWORKS: tuple[Network, ...] = Network.__args__
DATASETS: tuple[Dataset, ...] = Dataset.__args__
MODELS: tuple[Model, ...] = Model.__args__
MIXTURES: tuple[Model, ...] = ("moe", "moe-all-dense")
TITLES = {"mlp": "MLP", "lenet": "LeNet", "densenet": "DenseNet", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
NAMES = {
    "original": "original",
    "low-rank": "static factors, Neurocoder's size",
    "moe": "MoE",
    "nsm": "NSM",
    "neurocoder": "Neurocoder",
    "recommended": "nc.recode(model, …)",
    "moe-all-dense": "MoE, all dense layers",
    "nsm-all-dense": "NSM, all dense layers",
}

CLASSES = {"cifar10": 10, "cifar100": 100}
BATCH = {"mlp": 128, "lenet": 128, "densenet": 32}
LAYOUT = {"mlp": torch.contiguous_format, "lenet": torch.channels_last, "densenet": torch.channels_last}  # the faster
NEUROCODER: dict[str, Any] = {
    "slots": 30, "steps": 5, "heads": 3, "key_dim": 5, "least_used": 5, "residual": True,
    "controller": 6, "rules": nc.Rules(gate="state"),  # sized to the paper's table
}  # fmt: skip
PEERS: dict[str, dict[str, Any]] = {
    "moe": {"layer": nc.peers.MixtureOfExperts, "experts": 10},
    "nsm": {"layer": nc.peers.StoredProgramMemory, "programs": 10},
    "neurocoder": NEUROCODER,
    "recommended": {},
}
SIZES: dict[str, dict[str, dict[str, int]]] = {  # by budget; `tested`: images to measure on
    "smoke": {name: {"epochs": 2, "examples": 256, "tested": 100, "depth": 10} for name in NETWORKS},
    "desk": {
        "mlp": {"epochs": 8, "examples": 50_000, "tested": 10_000, "depth": 0},
        "lenet": {"epochs": 8, "examples": 50_000, "tested": 10_000, "depth": 0},
        "densenet": {"epochs": 5, "examples": 10_000, "tested": 2000, "depth": 40},
    },
    "paper": {
        "mlp": {"epochs": 50, "examples": 50_000, "tested": 10_000, "depth": 0},
        "lenet": {"epochs": 50, "examples": 50_000, "tested": 10_000, "depth": 0},
        "densenet": {"epochs": 300, "examples": 50_000, "tested": 10_000, "depth": 100},
    },
}
FEW_STEPS = {"epochs": 1, "examples": 640, "tested": 100}  # of the DenseNet with 100 layers, at the desk
DEPTHS = (0, 10, 40, 100)
RATES = (0.0003, 0.001, 0.003)  # of Adam, tried on held-out data, the same for every model
SMALL = (0.0001, *RATES)  # experts in all dense layers learn nothing at 0.001
DENSENET_RATE = 0.1


@dataclass(frozen=True)
class Cifar(ImageConfig):
    """Small colour pictures of 10 or 100 kinds, told apart by one of three networks."""

    network: Network = "mlp"
    """mlp: 3072-512-256-classes; lenet: two convolutions, then the same; densenet: growth 12."""
    dataset: Dataset = "cifar10"
    """Which pictures."""
    model: Model = "neurocoder"
    """What becomes of the layers: all of the MLP, the output layer of the others, or (all-dense) all dense ones."""
    top_k: int | None = None
    """Experts an image uses, for MoE: 1 or 5, by default as chosen on held-out data; 0 where there are none."""
    depth: int | None = None
    """Layers of the DenseNet, by default 40, of budget paper 100; 0 for the other networks."""
    tested: int | None = None
    """Pictures to measure on: the first of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.endswith("all-dense") and self.network != "lenet":
            raise LabError(
                f"{self.model} is for lenet alone, whose output layer is small; got --network {self.network}"
            )
        if self.top_k and self.model not in MIXTURES:
            raise LabError(f"{self.model} has no experts: --top-k is for {' and '.join(MIXTURES)}")
        if self.top_k is not None and self.model in MIXTURES and not 1 <= self.top_k <= 10:
            raise LabError(f"top_k must be 1 to 10, got {self.top_k}")
        allowed = range(7, 1000, 3) if self.network == "densenet" else (0,)
        if self.depth is not None and self.depth not in allowed:
            what = (
                "4 and a multiple of 3, such as 40"
                if self.network == "densenet"
                else "--network densenet alone has one"
            )
            raise LabError(f"{self.network} has no depth {self.depth}: {what}")
        self.check_counts("tested")


def fill(config: Cifar) -> dict[str, Any]:
    def chosen(setting: str) -> Any:
        """At this place, or with CIFAR-10, whose networks differ in the last layer alone; for DenseNet as for LeNet."""
        place = {"network": "mlp" if config.network == "mlp" else "lenet", "model": config.model}
        return best("cifar", setting, dataset=config.dataset, **place) or best(
            "cifar", setting, dataset="cifar10", **place
        )

    sizes = SIZES[config.budget][config.network]
    if config.depth == 100 and config.budget == "desk":
        sizes = sizes | FEW_STEPS
    return sizes | {
        "depth": sizes["depth"] if config.network == "densenet" else 0,
        "rate": DENSENET_RATE if config.network == "densenet" else chosen("rate") or 0.001,
        "top_k": (chosen("top_k") or 1) if config.model in MIXTURES else 0,
    }


def plain(network: Network, classes: int, depth: int) -> nn.Sequential:
    if network == "mlp":
        return nn.Sequential(nn.Flatten(), *networks.mlp(3072, 512, 256, classes))
    return networks.lenet(classes) if network == "lenet" else networks.densenet(classes, depth)


def recoded(network: Network, classes: int, depth: int, all_dense: bool = False, **options: Any) -> nn.Sequential:
    """The network with every layer of the MLP re-coded, of others the output layer, or all dense ones."""
    made = plain(network, classes, depth)
    dense = [name for name, layer in made.named_modules() if isinstance(layer, nn.Linear)]
    nc.recode(made, dense if network == "mlp" or all_dense else dense[-1:], **options)
    return made


def build(network: Network, classes: int, model: Model, top_k: int = 1, depth: int = 40) -> nn.Sequential:
    """The network as the model says."""
    if model == "original":
        return plain(network, classes, depth)
    make = partial(recoded, network, classes, depth, all_dense=model.endswith("all-dense"))
    if model == "low-rank":
        with torch.device("meta"):
            size = sum(p.numel() for p in make(**NEUROCODER).parameters())
        return make(layer=nc.peers.LowRank, parameters=size)
    chosen = {"top_k": top_k} if model in MIXTURES else {}
    return make(**PEERS[model.removesuffix("-all-dense")], **chosen)


def jitter(x: Tensor) -> Tensor:
    """Shifted by up to four pixels and mirrored, at random."""
    count, size = len(x), x.shape[-1]
    x = torch.where(torch.rand(count, 1, 1, 1) < 0.5, x.flip(-1), x)
    rows, columns = torch.randint(0, 9, (2, count, 1)) + torch.arange(size)
    picture, channel = torch.arange(count)[:, None, None, None], torch.arange(x.shape[1])[:, None, None]
    return F.pad(x, (4, 4, 4, 4))[picture, channel, rows[:, None, :, None], columns[:, None, None, :]]


def in_steps(done: float) -> float:
    """A tenth after half of the training, a hundredth after three quarters."""
    return 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01


def start(config: Cifar) -> Classifier:
    model = build(config.network, CLASSES[config.dataset], config.model, config.top_k, config.depth)
    mean, std = PIXELS[config.dataset]
    more: dict[str, Callable[..., Any]] = {}
    if config.network == "densenet":
        optimiser: torch.optim.Optimizer = torch.optim.SGD(
            model.parameters(), lr=config.rate, momentum=0.9, nesterov=True, weight_decay=1e-4
        )
        more = {"schedule": in_steps, "augment": jitter}
    else:
        optimiser = torch.optim.Adam(model.parameters(), lr=config.rate, fused=True)
    pictures = data.images(config.dataset)
    prepare = partial(normalise, mean=mean, std=std, layout=LAYOUT[config.network])
    return Classifier(
        model, optimiser, pictures, config, BATCH[config.network], prepare, tested=config.tested, **more
    )  # fmt: skip


def paper(dataset: Dataset, network: Network) -> dict[str, float]:
    """The paper's best of five runs."""
    return numbers(f"nc-{dataset}-{network}")


def _about(runs: Runs) -> str:
    """What was trained for how long, where that is less than all, and in which precision, where that is not full."""
    config, precisions = runs[0]["config"], runs.precisions()
    length = f"{config['epochs']} epoch{'s' if config['epochs'] > 1 else ''}" + (
        f" of {config['examples']:,} pictures" if config["examples"] < 50_000 else ""
    )
    length += f", {' and '.join(precisions)}" if precisions != ["full"] else ""
    if config["network"] != "densenet":
        return f"{TITLES[config['network']]}, {TITLES[config['dataset']]}, {length}"
    short = "" if config["budget"] == "paper" else "; much shortened, no verdict"
    return f"DenseNet-{config['depth']}, {TITLES[config['dataset']]}, {length}{short}"


def _by_network(runs: Runs) -> list[Runs]:
    """Those that can be compared: of the same data set, network and depth."""
    places = product(DATASETS, NETWORKS, sorted({run["config"]["depth"] for run in runs}))
    found = [runs.where(dataset=dataset, network=network, depth=depth) for dataset, network, depth in places]
    return [mine for mine in found if mine]


def tabulate(runs: Runs) -> list[Table]:
    tables = []
    for mine in _by_network(runs):
        rows = []
        for model in MODELS:
            ran = mine.where(model=model)
            if ran:
                config, accuracy = ran[0]["config"], ran.values("test")
                name = NAMES[model] + (f", {config['top_k']} of 10" if config["top_k"] else "")
                theirs = paper(config["dataset"], config["network"]).get(model)
                rows.append([
                    name, f"{ran[0]['final']['parameters']:,}", f"{config['rate']:g}", spread(accuracy),
                    f"{max(accuracy):.2f}", f"{theirs:.2f}" if theirs else "-", spread(ran.values("train")),
                ])  # fmt: skip
        header = ["model", "parameters", "rate", "test accuracy, %", "best", "paper, best of 5", "in training, %"]
        tables.append((_about(mine), header, rows))
    return tables


def draw(runs: Runs) -> list[Picture]:
    """Test accuracy against epochs, for each network and data set."""
    pictures = []
    for mine in _by_network(runs):
        lines = {}
        for model in MODELS:
            curve = mine.where(model=model).curve("test")
            if curve is not None:
                lines[NAMES[model]] = ([*range(1, len(curve[0]) + 1)], *curve[1:])
        if any(len(epochs) > 1 for epochs, *_ in lines.values()):
            title = f"{_about(mine)}: test accuracy, {mine.shown()}"
            pictures.append((title, figures.curves(lines, "test accuracy, %", log=False, over="epochs")))
    return pictures


def _tried(models: tuple[Model, ...], network: tuple[Network, ...], **more: tuple[float, ...]) -> Grid:
    return Grid(
        {"network": network, "dataset": DATASETS, "model": models},
        lambda place: {"rate": RATES} | more,
        {"measure": "validation", "examples": 10_000, "epochs": 3},
        "validation",
    )


EXPERIMENT = Experiment(
    name="cifar",
    config=Cifar,
    metrics=("steps", "parameters", "test", "validation", "train", "loss"),
    axes={"network": NETWORKS, "dataset": DATASETS, "model": MODELS, "depth": DEPTHS},
    fill=fill,
    start=start,
    figures=draw,
    tables=tabulate,
    grids=[
        _tried(("original", "low-rank", "nsm", "neurocoder", "recommended"), ("mlp", "lenet")),
        _tried(("nsm-all-dense",), ("lenet",)),
        _tried(("moe",), ("mlp", "lenet"), top_k=(1, 5)),
        _tried(("moe-all-dense",), ("lenet",), rate=SMALL, top_k=(1, 5)),
    ],
    main={"network": ("mlp", "lenet"), "dataset": ("cifar10",), "depth": (None,)},
)
