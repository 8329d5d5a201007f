"""Real data: local parquet under $NEUROCODER_DATA, else the hub; decoded once, cached as tensors, fingerprinted."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from neurocoder_lab.errors import LabError
from neurocoder_lab.store import make_folder, replacing

VARIABLE = "NEUROCODER_DATA"
HUB = {"mnist": "ylecun/mnist", "cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
IMAGES = {"mnist": ("image", "label"), "cifar10": ("img", "label"), "cifar100": ("img", "fine_label")}
HELD_OUT = 10  # every tenth training example is for validation


@dataclass(frozen=True)
class Examples:
    """Images (N, channels, height, width) of bytes, or features of them (N, width), and their labels (N,).

    `train` and `validation` part the training data by a fixed rule: every tenth example is held out.
    """

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    fingerprint: str

    def parts(self, measure: Literal["test", "validation"]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """What to train on and what to measure on: what is held out is trained on when the test data are measured."""
        if measure == "validation":
            return self.train, self.validation
        (x, y), (held_x, held_y) = self.train, self.validation
        return (torch.cat((x, held_x)), torch.cat((y, held_y))), self.test


def images(name: str) -> Examples:
    """A data set of labelled images."""
    if name not in IMAGES:
        raise LabError(f"no image data set is called {name!r}; there are {', '.join(IMAGES)}")
    (x, y), print_of_train = _split(name, "train")
    test, print_of_test = _split(name, "test")
    held_out = torch.arange(len(y)) % HELD_OUT == HELD_OUT - 1
    fingerprint = hashlib.blake2b((print_of_train + print_of_test).encode(), digest_size=8).hexdigest()
    return Examples((x[~held_out], y[~held_out]), (x[held_out], y[held_out]), test, fingerprint)


def _split(name: str, split: str) -> tuple[tuple[Tensor, Tensor], str]:
    kept = cache() / f"{name}-{split}.safetensors"
    source = _local(name, split)
    stamp = f"{source.stat().st_size}-{source.stat().st_mtime_ns}" if source else "hub"
    if kept.is_file():
        with suppress(SafetensorError), safe_open(kept, framework="pt") as file:  # a broken one is made again
            about = file.metadata() or {}
            if about.get("stamp") == stamp:
                return (file.get_tensor("x"), file.get_tensor("y")), about["fingerprint"]
    x, y = _decode(name, split, source)
    fingerprint = hashlib.blake2b(x.numpy().tobytes() + y.numpy().tobytes(), digest_size=16).hexdigest()
    make_folder(kept.parent)
    with replacing(kept) as temporary:
        save_file({"x": x, "y": y}, temporary, metadata={"stamp": stamp, "fingerprint": fingerprint})
    return (x, y), fingerprint


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "neurocoder"


def _local(name: str, split: str) -> Path | None:
    folder = os.environ.get(VARIABLE)
    if folder and not Path(folder).is_dir():
        raise LabError(
            f"{VARIABLE} is set to {folder}, which is no folder: set it to one that holds {name}/, or unset it"
        )
    file = Path(folder) / name / f"{split}.parquet" if folder else None
    return file if file is not None and file.is_file() else None


def _decode(name: str, split: str, source: Path | None) -> tuple[Tensor, Tensor]:
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.disable_progress_bars()
    image, label = IMAGES[name]
    try:
        if source is not None:
            table = datasets.load_dataset("parquet", data_files=str(source), split="train")
        else:
            table = datasets.load_dataset(HUB[name], split=split)
    except (OSError, ValueError, DatasetsError) as error:
        if source is not None:
            told = f"is it whole, and can {cache().parent} be written to?"
            raise LabError(f"{source} cannot be read ({error}): {told}") from None
        now = f", as {os.environ[VARIABLE]} does not" if os.environ.get(VARIABLE) else ""
        raise LabError(
            f"{name} is neither here nor to be had ({type(error).__name__}): fetch huggingface.co/datasets/{HUB[name]} "
            f"and set {VARIABLE} to a folder that holds {name}/{split}.parquet{now}"
        ) from None
    columns = table.with_format("torch")[:]
    x = columns[image]
    x = x if isinstance(x, Tensor) else torch.stack([*x])
    return (x[:, None] if x.dim() == 3 else x).contiguous(), columns[label].long()
