"""Features of a frozen backbone: real weights, computed once, remade where a file is broken."""

import pytest
import torch
from safetensors.torch import save_file

from neurocoder_lab import features as module
from neurocoder_lab.errors import LabError
from neurocoder_lab.features import features
from neurocoder_lab.networks import resnet18
from tests.lab import pictures


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUROCODER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pictures.write(tmp_path, "cifar10", "train", 20, size=32)
    pictures.write(tmp_path, "cifar10", "test", 6, size=32, seed=1)
    return tmp_path


def test_features_are_computed_once_and_whole(folder, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 8)
    first = features("cifar10", quiet=True)
    assert first.train[0].shape == (18, 1280)
    assert first.validation[0].shape == (2, 1280)
    assert sorted(first.test[1].tolist()) == [*range(6)]
    assert first.train[0].dtype == torch.float16
    assert first.train[0].float().std() > 0.1
    pieces = sorted((folder / "cache" / "neurocoder" / "features").rglob("*.safetensors"))
    assert len(pieces) == 5
    with monkeypatch.context() as patch:
        patch.setattr(module, "load", lambda *args: pytest.fail("computed twice"))
        assert torch.equal(features("cifar10", quiet=True).train[0], first.train[0])
    pieces[0].write_bytes(pieces[0].read_bytes()[:50])
    pieces[1].unlink()
    again = features("cifar10", quiet=True)
    assert all(
        torch.equal(a[0], b[0]) for a, b in zip((again.train, again.test), (first.train, first.test), strict=True)
    )
    assert again.fingerprint == first.fingerprint


def test_resnet18_takes_weights_named_as_torchvisions(folder, tmp_path):
    torch.manual_seed(0)
    ours = resnet18().eval()
    outer = {"0": "conv1", "1": "bn1", "14": "fc"}
    inner = {"first": "conv1", "second": "conv2", "norms.0": "bn1", "norms.1": "bn2", "shortcut": "downsample"}
    theirs = {}
    for name, tensor in ours.state_dict().items():
        index, rest = name.split(".", 1)
        if index in outer:
            theirs[f"{outer[index]}.{rest}"] = tensor
        elif rest != "num_batches_tracked":
            layer, block = divmod(int(index) - 4, 2)
            old = next(part for part in inner if rest.startswith(part))
            theirs[f"layer{layer + 1}.{block}.{inner[old]}{rest[len(old) :]}"] = tensor
    file = tmp_path / "resnet.safetensors"
    save_file(theirs, file)
    x = torch.randn(2, 3, 64, 64)
    loaded = module.load("resnet18", str(file)).eval()
    assert torch.equal(loaded(x), ours[:-1](x))
    assert loaded(x).shape == (2, 512)
    assert features("cifar10", "resnet18", str(file), quiet=True).train[0].shape == (18, 512)
    del theirs["fc.weight"]
    save_file(theirs, file)
    with pytest.raises(LabError, match="does not hold a ResNet-18"):
        module.load("resnet18", str(file))
    file.write_bytes(b"no weights at all")
    with pytest.raises(LabError, match="cannot be read as safetensors"):
        module.load("resnet18", str(file))
    with pytest.raises(LabError, match="needs --weights"):
        features("cifar10", "resnet18", quiet=True)
