"""Data: decoded once from local parquet, split by a fixed rule, fingerprinted; absent, it says what to do."""

import os
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from neurocoder_lab import data
from neurocoder_lab.errors import LabError


def write(folder, name: str, split: str, count: int, seed: int) -> None:
    image, label = data.IMAGES[name]
    drawn = np.random.default_rng(seed).integers(
        0, 256, (count, 8, 8) + ((3,) if name != "mnist" else ()), dtype=np.uint8
    )
    columns = {image: [Image.fromarray(pixels) for pixels in drawn], label: [n % 10 for n in range(count)]}
    kinds = datasets.Features({image: datasets.Image(), label: datasets.Value("int64")})
    (folder / name).mkdir(exist_ok=True)
    datasets.Dataset.from_dict(columns, features=kinds).to_parquet(folder / name / f"{split}.parquet")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUROCODER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(("name", "channels"), [("mnist", 1), ("cifar10", 3), ("cifar100", 3)])
def test_images_are_split_and_cached(folder, monkeypatch, name, channels):
    write(folder, name, "train", 40, 0)
    write(folder, name, "test", 10, 1)
    first = data.images(name)
    assert first.train[0].shape == (36, channels, 8, 8)
    assert first.train[0].dtype == torch.uint8
    assert first.validation[1].tolist() == [9, 9, 9, 9]
    assert first.test[1].tolist() == [*range(10)]
    with monkeypatch.context() as patch:
        patch.setattr(data, "_decode", lambda *args: pytest.fail("decoded twice"))
        again = data.images(name)
    assert torch.equal(again.train[0], first.train[0])
    assert again.fingerprint == first.fingerprint
    cache = folder / "cache" / "neurocoder" / f"{name}-train.safetensors"
    cache.write_bytes(cache.read_bytes()[:100])
    assert data.images(name).fingerprint == first.fingerprint
    write(folder, name, "test", 10, 2)
    assert data.images(name).fingerprint != first.fingerprint


def test_another_data_set_and_broken_pictures_are_named(folder):
    write(folder, "mnist", "train", 10, 0)
    (folder / "mnist").rename(folder / "cifar10")
    with pytest.raises(LabError, match="has columns image, label, but none called img: is it cifar10"):
        data.images("cifar10")
    broken = {"image": [{"bytes": b"no picture", "path": None}] * 10, "label": [*range(10)]}
    (folder / "mnist").mkdir()
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(broken, features=kinds).to_parquet(folder / "mnist" / "train.parquet")
    with pytest.raises(LabError, match=r"mnist/train.parquet holds pictures that cannot be decoded"):
        data.images("mnist")


def test_a_file_that_cannot_be_read_is_named(folder):
    (folder / "mnist").mkdir()
    (folder / "mnist" / "train.parquet").write_text("not parquet")
    with pytest.raises(LabError, match=r"mnist/train.parquet cannot be read"):
        data.images("mnist")


def test_a_folder_that_is_not_there_is_named_at_once(folder, monkeypatch):
    monkeypatch.setattr(data, "_decode", lambda *args: pytest.fail("went to the hub"))
    monkeypatch.setenv("NEUROCODER_DATA", str(folder / "absent"))
    with pytest.raises(LabError, match=r"NEUROCODER_DATA is set to .*absent, which is no folder"):
        data.images("mnist")


def test_unknown_and_absent(folder):
    with pytest.raises(LabError, match="no image data set is called 'mnst'"):
        data.images("mnst")
    program = "from neurocoder_lab import data\ntry: data.images('mnist')\nexcept data.LabError as error: print(error)"
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert f"set NEUROCODER_DATA to a folder that holds mnist/train.parquet, as {folder} does not" in told.stdout
