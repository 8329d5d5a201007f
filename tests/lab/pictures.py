"""Small data sets in the layout of the real ones, for tests: every class has a bright spot of its own."""

from pathlib import Path

import datasets
import numpy as np
from PIL import Image

from neurocoder_lab import data


def write(folder: Path, name: str, split: str, count: int, classes: int = 10, size: int = 28, seed: int = 0) -> None:
    image, label = data.IMAGES[name]
    random = np.random.default_rng(seed)
    labels = random.permutation([n % classes for n in range(count)]).tolist()
    drawn = random.integers(0, 80, (count, size, size) + ((3,) if name != "mnist" else ()), dtype=np.uint8)
    for pixels, which in zip(drawn, labels, strict=True):
        row, column = divmod(which % 25, 5)
        pixels[5 * row : 5 * row + 5, 5 * column : 5 * column + 5] = 255
    columns = {image: [Image.fromarray(pixels) for pixels in drawn], label: labels}
    kinds = datasets.Features({image: datasets.Image(), label: datasets.Value("int64")})
    (folder / name).mkdir(exist_ok=True, parents=True)
    datasets.Dataset.from_dict(columns, features=kinds).to_parquet(folder / name / f"{split}.parquet")
