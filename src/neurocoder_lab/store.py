"""Files of a run that survive a crash: written to a temporary file, flushed, renamed. No pickle anywhere."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
KEEP = 2  # checkpoints in a folder: the newest, and one to fall back on


class LabError(Exception):
    """Something the user can mend; shown without a traceback."""


class Stopped(Exception):
    """The run was asked to stop, and has written a checkpoint."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place if the block succeeds; else nothing is left behind."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = f"no space left while writing {path}; what was there before is whole: free some and go on"
            raise LabError(text) from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise LabError(f"{path.parent} cannot be written to: {error.strerror}; choose another folder") from None
        raise LabError(f"{path} cannot be written: {error.strerror or error}; choose another place") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError):
        raise LabError(
            f"{path} is not whole JSON: it was cut short or edited; remove its folder to start again"
        ) from None


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"{folder} cannot be made: {error.strerror}; choose another folder") from None


def _lock(folder: Path, name: str) -> Any:
    try:
        return open(folder / name, "a+")
    except OSError as error:
        raise LabError(f"{folder} cannot be written to: {error.strerror}; choose another folder") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuse a second process in the folder. The lock is the system's: it ends with the process, however that dies."""
    with _lock(folder, "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise LabError(
                f"process {file.read() or 'of another'} is running in {folder}: wait for it or stop it"
            ) from None
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def waiting_for(folder: Path) -> Iterator[None]:
    """Change the folder's files one process after the other, by a lock of the same kind."""
    with _lock(folder, ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(tensors: dict[str, Tensor]) -> str:
    """Of all names and bytes: safetensors notices a file cut short, but not a flipped bit."""
    total = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].reshape(-1).contiguous().view(torch.uint8).numpy())
    return total.hexdigest()


def save_checkpoint(folder: Path, step: int, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write checkpoint `step`; older ones but the last are removed once it is whole."""
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    header = json.dumps({"format": FORMAT, "digest": _digest(tensors), "step": step} | about)
    make_folder(folder)
    with replacing(folder / f"step-{step:09d}.safetensors") as temporary:
        try:
            save_file(tensors, temporary, metadata={"neurocoder": header})
        except SafetensorError as error:
            if "No space left" in str(error) or "os error 28" in str(error):
                raise OSError(errno.ENOSPC, str(error)) from None
            raise
    for old in _checkpoints(folder)[KEEP:]:
        old.unlink()


def load_checkpoint(folder: Path, logged: int, say: Any = print) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest whole checkpoint whose `logged` bytes of metrics are there; None if there is none.

    Broken ones are put aside, which is said, and what a killed process left half written is removed.
    """
    for left in folder.glob(".step-*"):
        left.unlink()
    for path in _checkpoints(folder):
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("neurocoder", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise LabError(
                    f"{path} was written by another version of the laboratory: remove its folder to start again"
                )
            if header["digest"] != _digest(tensors):
                raise ValueError("its contents have changed since")
            if header["metrics"] > logged:
                raise ValueError("the metrics logged before it are gone")
            return tensors, header
        except (SafetensorError, ValueError, KeyError, OSError) as error:
            path.rename(path.with_name(f"corrupt-{path.name}"))
            say(f"{path.name} is corrupt ({error}): going back to the one before it, or to the start")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)
