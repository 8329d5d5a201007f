"""CIFAR-10 by modular networks (Figs 2 and 6, appendix D of Modular Networks).

    neurocoder tune modular-cifar
    neurocoder run modular-cifar --model convolution
    neurocoder sweep modular-cifar --seeds 5

Three modular convolutions, 3 x 3, stride 2, a channel a module, and two modular dense layers, 48 and 10 wide; 2 of 10
modules are chosen in each layer and concatenated. The controllers of the convolutions are linear in all pixels, or
small convolutions. The baseline has plain layers of the same widths. All learn by Adam, at a rate that falls linearly
to zero, the baseline's best on held-out data; the modular ones by EM, with an E-step on a random batch before every
15th step, or every fifth, or every one. `paths` is the network of Fig 2: six layers, 1 of 3 modules each. The
log-likelihood of a modular network sums over too many compositions: measured is what EM raises and it is at least, that
of the labels and the stored modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.modular.route import Given, routed
from neurocoder.modular.training import classification
from neurocoder_lab import data, figures
from neurocoder_lab.attention import rounded
from neurocoder_lab.classification import AT_ONCE, PIXELS, Classifier, ImageConfig, normalise
from neurocoder_lab.modules import BETWEEN, Lesson, chosen, in_order, numbered
from neurocoder_lab.results import Runs, spread
from neurocoder_lab.task import Experiment, Grid, Picture, Table
from neurocoder_lab.tuning import best

Model = Literal["linear", "convolution", "baseline", "linear-5-steps", "linear-1-step", "paths"]
MODELS: tuple[Model, ...] = Model.__args__
NAMES = {
    "linear": "modular, linear controller",
    "convolution": "modular, convolutional controller",
    "baseline": "plain baseline",
    "linear-5-steps": "linear controller, 5 steps between E-steps",
    "linear-1-step": "linear controller, 1 step between E-steps",
    "paths": "six layers, 1 of 3 modules",
}
ACCURACIES = {"test": "test", "train": "training"}
STEPS: dict[str, int] = {"linear-5-steps": 5, "linear-1-step": 1}  # gradient steps between E-steps; others: 15
CHANNELS, WIDTHS = (2, 2, 2), (48, 10)
DEEPER = (8, 8, 8), (48, 48, 10)  # of `paths`; the paper gives no widths
PATHS = {"modules": 3, "choices": 1}
SIZE, BATCH = 32, 128
SIZES: dict[str, dict[str, int]] = {  # by budget
    "smoke": {"epochs": 2, "examples": 256},
    "desk": {"epochs": 240, "examples": 5000},  # E-steps reach an image 16 times, as those of 50,000 on Penn Treebank
    "paper": {"epochs": 300, "examples": 50_000},
}
RATES = (0.0003, 0.001, 0.003, 0.01)  # of Adam, tried with the baseline on held-out data, for all models
UNTUNED = 0.003
TRAIN = 5000  # training images whose accuracy is measured: the first of them
EVALUATIONS = 15
STAGES, CLUSTERS = (0.0, 0.2, 0.5), 3  # Fig 2: shares of training (a step at least), and the end; paths shown


@dataclass(frozen=True)
class ModularCifar(ImageConfig):
    """Small colour pictures of ten kinds, told apart by a network of modular layers."""

    model: Model = "linear"
    """What chooses modules, how often EM reassigns them, or the baseline without."""


def fill(config: ModularCifar) -> dict[str, Any]:
    return SIZES[config.budget] | {"rate": best("modular-cifar", "rate", model="baseline") or UNTUNED}


def build(model: Model) -> nn.Sequential:
    """Plain layers, each of which is then made modular."""
    channels, widths = DEEPER if model == "paths" else (CHANNELS, WIDTHS)
    layers: list[nn.Module] = []
    before, size, sizes = 3, SIZE, []
    for width in channels:
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.ReLU()]
        sizes.append(size)
        before, size = width, size // 2
    layers.append(nn.Flatten())
    before *= size**2
    for width in widths:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    network = nn.Sequential(*layers[:-1])
    if model != "baseline":
        options = PATHS if model == "paths" else {"modules": 10, "choices": 2, "combine": "concatenate"}
        make_modular = partial(nc.recode, network, dispatch="dense", **options)
        convolutions = [name for name, layer in network.named_children() if isinstance(layer, nn.Conv2d)]
        dense = [name for name, layer in network.named_children() if isinstance(layer, nn.Linear)]
        for name, size in zip(convolutions, sizes, strict=True):
            linear = {} if model == "convolution" else {"controller": "linear", "input_size": (size, size)}
            make_modular(name, layer=nc.modular.Conv2d, **linear)
        make_modular(dense, layer=nc.modular.Linear)
    return network


class Pictures(Classifier):
    """Learns by EM, or plainly, and looks at what is chosen."""

    def __init__(self, config: ModularCifar):
        model = build(config.model)
        optimiser = torch.optim.Adam(model.parameters(), lr=config.rate, fused=True)
        prepare = partial(normalise, mean=PIXELS["cifar10"][0], std=PIXELS["cifar10"][1])
        super().__init__(model, optimiser, data.images("cifar10"), config, BATCH, prepare)
        self.evaluate_every = self.epoch_steps * max(config.epochs // EVALUATIONS, 1)
        self.modular, self.between = config.model != "baseline", STEPS.get(config.model, BETWEEN)
        self.stages = {max(int(share * self.steps), 1) for share in STAGES} if config.model == "paths" else set()
        self.stored: list[Tensor] = []

    def attach(self, accelerator: Accelerator) -> None:
        super().attach(accelerator)
        self.lesson = Lesson("em", self.network, classification, len(self.y), self.between) if self.modular else None

    def train_on(self, index: int, rows: Tensor) -> dict[str, Tensor]:
        if self.lesson is None:
            return {"loss": super().train_on(index, rows)["loss"]}
        loss = self.lesson.loss(
            index, lambda: self._batch(rows), lambda: self._batch(torch.randint(len(self.y), (self.batch,)))
        )
        self.learn(loss)
        if index + 1 in self.stages:
            self.stored.append(self._choices().clone())
        return {"loss": loss}

    def _choices(self) -> Tensor:
        """Those that EM has stored, (N, T)."""
        assert self.lesson is not None
        assert self.lesson.choices is not None
        return self.lesson.choices

    def _batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y, rows = self.images(rows)
        return x, y, rows

    def evaluate(self) -> dict[str, float]:
        """Accuracies in percent, with the most likely modules; log-likelihoods of training images; what is chosen for
        the images to measure on."""
        labels, logits = self.y[:TRAIN], self.logits(self.x[:TRAIN])
        train = 100 * (logits.argmax(-1) == labels).float().mean().item()
        likely = -F.cross_entropy(logits, labels).item()
        with nc.trace(self.model) as seen:
            measured = super().evaluate()
        measured |= {"train": train, "gap": train - measured[self.measure], "log_likelihood": likely}
        if self.modular:
            measured |= {"log_likelihood": self._bound(), "log_likelihood_likely": likely} | chosen(seen)
        return measured

    def _bound(self) -> float:
        """What EM raises, and log p(y | x) is at least: the mean of log p(y, a* | x) for the stored modules a*."""
        total, (known, labels, choices) = 0.0, (tensor[:TRAIN] for tensor in (self.x, self.y, self._choices()))
        for x, y, a in zip(known.split(AT_ONCE), labels.split(AT_ONCE), choices.split(AT_ONCE), strict=True):
            with routed(self.model, Given(a)) as route:
                score = classification(self.logits(x), y)
            assert route.log_prob is not None
            total += (score + route.log_prob.cpu()).double().sum().item()
        return total / len(known)

    def conclude(self) -> dict[str, Any]:
        if self.lesson is None:
            return {}
        reached = self.lesson.reached(self.steps, self.batch)
        if not self.stages:
            return reached
        stages = zip([*sorted(self.stages), self.steps], [*self.stored, self._choices()], strict=True)
        return reached | {"clusters": clusters(dict(stages), PATHS["modules"])}

    def state(self) -> dict[str, Tensor]:
        return super().state() | numbered("stored", self.stored) | ({} if self.lesson is None else self.lesson.state())

    def load_state(self, state: dict[str, Tensor]) -> None:
        super().load_state(state)
        self.stored = in_order("stored", state)
        if self.lesson is not None:
            self.lesson.load_state(state)


def clusters(stages: dict[int, Tensor], modules: int) -> list[dict[str, Any]]:
    """The most common paths at the end, and which ways the images that have them took before: shares of them.

    Args:
        stages: after so many steps, the stored module of every image in every layer, (N, layers).
    """
    paths, inverse, counts = [*stages.values()][-1].unique(dim=0, return_inverse=True, return_counts=True)
    found = []
    for which in counts.argsort(descending=True)[:CLUSTERS].tolist():
        mine = {step: F.one_hot(stored[inverse == which].long(), modules).double() for step, stored in stages.items()}
        found.append({
            "images": int(counts[which]),
            "path": [module + 1 for module in paths[which].tolist()],
            "stages": {
                str(step): {
                    "nodes": rounded(one_hot.mean(0)),
                    "edges": rounded(torch.einsum("nla,nlb->lab", one_hot[:, :-1], one_hot[:, 1:]) / len(one_hot)),
                }
                for step, one_hot in mine.items()
            },
        })  # fmt: skip
    return found


def tabulate(runs: Runs) -> list[Table]:
    """Fig 6 in numbers, and what the steps between E-steps do."""
    measured = {
        "train": "train accuracy, %", "test": "test accuracy, %", "gap": "gap, points",
        "h_a": "H_a, test images", "h_b": "H_b, test images", "modules_used": "modules used of a layer, test images",
        "log_likelihood": "log-likelihood, training images; modular: at least",
        "log_likelihood_likely": "with the most likely modules", "e_steps": "E-steps of an image",
    }  # fmt: skip
    header = ["network", "parameters", "rate", *measured.values()]

    def row(model: Model) -> list[str]:
        mine = runs.where(model=model)
        cells = [spread(mine.values(metric), 3) for metric in measured]
        return [NAMES[model], f"{mine[0]['final']['parameters']:,}", f"{mine[0]['config']['rate']:g}", *cells]

    tables = []
    length = "{epochs} epochs of {examples:,} images".format(**runs[0]["config"]) if runs else ""
    for title, models in (
        (f"CIFAR-10, {length}: 2 of 10 modules, H_b at most 2 ln 10 = {2 * log(10):.2f} (Fig 6)", MODELS[:3]),
        ("Gradient steps between E-steps at equal gradient steps (section 2.3)",
         ("linear", "linear-5-steps", "linear-1-step")),
        ("The network of Fig 2", ("paths",)),
    ):  # fmt: skip
        rows = [row(model) for model in models if runs.where(model=model)]
        if rows:
            tables.append((title, header, rows))
    return tables


def draw(runs: Runs) -> list[Picture]:
    """Figs 6 and 2."""
    pictures = []

    models = {NAMES[model]: {"model": model} for model in ("baseline", "linear", "convolution")}
    parts = {f"{name} accuracy, %": runs.curves(metric, models) for metric, name in ACCURACIES.items()}
    if all(parts.values()):
        pictures.append(("Fig 6: test and training accuracy, mean ± std over seeds", figures.panels(parts)))
    models = {f"{STEPS.get(model, BETWEEN)} steps": {"model": model} for model in ("linear", *STEPS)}
    labels = {"h_b": "H_b of test images, nats", "log_likelihood": "log p(y, a* | x), nats"}
    parts = {label: runs.curves(metric, models) for metric, label in labels.items()}
    if len(parts[labels["h_b"]]) > 1:
        title = "Gradient steps between E-steps (linear controller): batch module selection entropy, and the bound of"
        title += " the log-likelihood of training images by the stored modules a*"
        pictures.append((title, figures.panels(parts, skip=1)))
    for run in runs.where(model="paths")[:1]:
        title = f"Fig 2: modules stored for the images that end on one path, for the {CLUSTERS} most common paths"
        found = {
            f"path {'-'.join(map(str, cluster['path']))}\n{cluster['images']:,} images": {
                f"step {int(step):,}": stage for step, stage in cluster["stages"].items()
            }
            for cluster in run["final"]["clusters"]
        }
        pictures.append((title, figures.paths(found)))
    return pictures


EXPERIMENT = Experiment(
    name="modular-cifar",
    config=ModularCifar,
    metrics=(
        "steps", "parameters", "loss", "train", "test", "validation", "gap", "h_a", "h_b", "modules_used",
        "log_likelihood", "log_likelihood_likely", "e_steps",
    ),
    axes={"model": MODELS},
    fill=fill,
    start=Pictures,
    figures=draw,
    tables=tabulate,
    grids=[
        Grid(
            {"model": ("baseline",)},
            lambda place: {"rate": RATES},
            {"measure": "validation"},
            "validation",
        )
    ],
)  # fmt: skip
