"""A small text in the layout of Penn Treebank, for tests: sentences of a simple grammar, with numbers and articles."""

from pathlib import Path

import datasets
import numpy as np

THINGS = [f"thing{n}" for n in range(30)]
VERBS = [f"verb{n}" for n in range(10)]


def write(folder: Path, split: str, count: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    sentences = []
    for _ in range(count):
        subject, other = random.choice(THINGS, 2)
        ends = [f"the {other}", "N", f"N <unk> of the {other}"]
        sentences.append(f"the {subject} {random.choice(VERBS)} {random.choice(ends)}")
    table = datasets.Dataset.from_dict({"sentence": sentences})
    (folder / "ptb").mkdir(exist_ok=True, parents=True)
    table.to_parquet(folder / "ptb" / f"{split}.parquet")
