"""Real data: local parquet under $NEUROCODER_DATA, else the hub; decoded once, cached as tensors, fingerprinted."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from neurocoder_lab import cache
from neurocoder_lab.errors import LabError

VARIABLE = "NEUROCODER_DATA"
HUB = {
    "mnist": "ylecun/mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "ptb": "ptb-text-only/ptb_text_only",
}
IMAGES = {"mnist": ("image", "label"), "cifar10": ("img", "label"), "cifar100": ("img", "fine_label")}
TEXTS = {"ptb": "sentence"}
END = "<eos>"  # a word of its own after every sentence
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
    (train, print_of_train), (test, print_of_test) = (_split(name, split) for split in ("train", "test"))
    x, y = train["x"], train["y"]
    held_out = torch.arange(len(y)) % HELD_OUT == HELD_OUT - 1
    return Examples(
        (x[~held_out], y[~held_out]),
        (x[held_out], y[held_out]),
        (test["x"], test["y"]),
        _together(print_of_train, print_of_test),
    )


@dataclass(frozen=True)
class Words:
    """Three texts as the places of their words in `vocabulary`, (N,), which has the most frequent word first."""

    train: Tensor
    validation: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]
    fingerprint: str


def words(name: str) -> Words:
    """A data set of sentences, each followed by `END`; the vocabulary is that of the training text."""
    if name not in TEXTS:
        raise LabError(f"no text is called {name!r}; there are {', '.join(TEXTS)}")
    splits = [_split(name, split) for split in ("train", "validation", "test")]
    texts = [bytes(tensors["text"].numpy()).decode().split() for tensors, _ in splits]
    counts = Counter(texts[0])
    vocabulary = sorted(counts, key=lambda word: (-counts[word], word))
    place = {word: n for n, word in enumerate(vocabulary)}
    strange = sorted({*texts[1], *texts[2]} - {*vocabulary})
    if strange:
        raise LabError(f"{name} is measured on words that its training text does not have, such as {strange[0]!r}")
    train, validation, test = (torch.tensor([place[word] for word in text]) for text in texts)
    return Words(train, validation, test, tuple(vocabulary), _together(*(print_ for _, print_ in splits)))


def streams(text_N: Tensor, count: int) -> Tensor:
    """The text in so many equal pieces, (count, length); what is left over is dropped."""
    return text_N[: len(text_N) // count * count].view(count, -1)


def segments(text_BL: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Words and those that follow them, (B, steps), the last pair perhaps shorter: each stream from end to end."""
    for start in range(0, text_BL.shape[1] - 1, steps):
        piece = text_BL[:, start : start + steps + 1]
        yield piece[:, :-1], piece[:, 1:]


def _together(*fingerprints: str) -> str:
    return hashlib.blake2b("".join(fingerprints).encode(), digest_size=8).hexdigest()


def _split(name: str, split: str) -> tuple[dict[str, Tensor], str]:
    """The tensors of a split, and their fingerprint."""
    source = _local(name, split)
    stamp = f"{source.stat().st_size}-{source.stat().st_mtime_ns}" if source else "hub"

    def make() -> tuple[cache.Tensors, dict[str, str]]:
        tensors = _decode(name, split, source)
        content = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
        return tensors, {"fingerprint": hashlib.blake2b(content, digest_size=16).hexdigest()}

    tensors, about = cache.kept(cache.folder() / f"{name}-{split}.safetensors", stamp, make)
    return tensors, about["fingerprint"]


def _local(name: str, split: str) -> Path | None:
    folder = os.environ.get(VARIABLE)
    if folder and not Path(folder).is_dir():
        raise LabError(
            f"{VARIABLE} is set to {folder}, which is no folder: set it to one that holds {name}/, or unset it"
        )
    file = Path(folder) / name / f"{split}.parquet" if folder else None
    return file if file is not None and file.is_file() else None


def _decode(name: str, split: str, source: Path | None) -> dict[str, Tensor]:
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.disable_progress_bars()
    try:
        if source is not None:
            table = datasets.load_dataset("parquet", data_files=str(source), split="train")
        else:
            table = datasets.load_dataset(HUB[name], split=split)
    except (OSError, ValueError, DatasetsError) as error:
        if source is not None:
            told = f"is it whole, and can {cache.folder().parent} be written to?"
            raise LabError(f"{source} cannot be read ({error}): {told}") from None
        now = f", as {os.environ[VARIABLE]} does not" if os.environ.get(VARIABLE) else ""
        raise LabError(
            f"{name} is neither here nor to be had ({type(error).__name__}): fetch huggingface.co/datasets/{HUB[name]} "
            f"and set {VARIABLE} to a folder that holds {name}/{split}.parquet{now}"
        ) from None
    wanted = IMAGES.get(name) or (TEXTS[name],)
    missing = [column for column in wanted if column not in table.column_names]
    if missing:
        there = ", ".join(table.column_names)
        raise LabError(f"{source or HUB[name]} has columns {there}, but none called {missing[0]}: is it {name}?")
    if name in TEXTS:
        text = " ".join(f"{sentence} {END}" for sentence in table[TEXTS[name]])
        return {"text": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}
    image, label = IMAGES[name]
    try:
        columns = table.with_format("torch")[:]
    except (OSError, ValueError) as error:
        raise LabError(f"{source or HUB[name]} holds pictures that cannot be decoded: {error}") from None
    x = columns[image]
    x = x if isinstance(x, Tensor) else torch.stack([*x])
    return {"x": (x[:, None] if x.dim() == 3 else x).contiguous(), "y": columns[label].long()}
