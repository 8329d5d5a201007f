"""What takes long to find and can be found again: tensors in files of a cache, made anew where one is broken or old."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from neurocoder_lab.store import make_folder, replacing

Tensors = dict[str, Tensor]


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "neurocoder"


def kept(file: Path, stamp: str, make: Callable[[], tuple[Tensors, dict[str, str]]]) -> tuple[Tensors, dict[str, str]]:
    """The tensors of the file, and what is said about them; where it has no such stamp, or none, those that `make`
    gives, which it has from then on."""
    if file.is_file():
        with suppress(SafetensorError, FileNotFoundError), safe_open(file, framework="pt") as stored:
            about = stored.metadata() or {}
            if about.get("stamp") == stamp:
                return {key: stored.get_tensor(key) for key in stored.keys()}, about  # noqa: SIM118
    tensors, about = make()
    make_folder(file.parent)
    with replacing(file) as temporary:
        save_file(tensors, temporary, metadata=about | {"stamp": stamp})
    return tensors, about


def digest(*tensors: Tensor) -> str:
    """A name for these numbers."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def trim(folder: Path, most: int) -> None:
    """Remove the files that were made first, until the rest of the folder has at most so many bytes."""
    size = 0
    files = [(file.stat(), file) for file in folder.glob("*.safetensors")]
    for about, file in sorted(files, key=lambda one: one[0].st_mtime_ns, reverse=True):
        size += about.st_size
        if size > most:
            file.unlink(missing_ok=True)
