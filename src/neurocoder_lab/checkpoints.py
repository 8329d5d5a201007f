"""Checkpoints of a run: all that its task has, whole or not there, checked when read, the last two kept; no pickle."""

from __future__ import annotations

import errno
import hashlib
import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from neurocoder_lab.errors import LabError
from neurocoder_lab.store import make_folder, replacing
from neurocoder_lab.task import Task

FORMAT = 1
KEEP = 2  # checkpoints in a folder: the newest, and one to fall back on


def capture(task: Task) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a task needs to go on as if nothing had happened: tensors by name, and what is none."""
    model = task.accelerator.unwrap_model(task.network)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    optimiser, scalars = task.optimiser.state_dict(), {}
    for index, entry in optimiser["state"].items():
        for name, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{index}.{name}"] = value
            else:
                scalars.setdefault(str(index), {})[name] = value
    tensors |= {f"extra.{name}": tensor for name, tensor in task.state().items()}
    tensors["random.torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    scaler = task.accelerator.scaler
    return tensors, {
        "groups": optimiser["param_groups"],
        "scalars": scalars,
        "random": random.getstate(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def restore(task: Task, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Bring a task to where it was captured."""

    def part(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}

    task.accelerator.unwrap_model(task.network).load_state_dict(part("model."))
    state: dict[int, dict[str, Any]] = {int(i): dict(entry) for i, entry in about["scalars"].items()}
    for name, tensor in part("optimiser.").items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    task.optimiser.load_state_dict({"state": state, "param_groups": about["groups"]})
    task.load_state(part("extra."))
    torch.set_rng_state(tensors["random.torch"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    if about["scaler"] is not None and task.accelerator.scaler is not None:
        task.accelerator.scaler.load_state_dict(about["scaler"])
    version, words, gauss = about["random"]
    random.setstate((version, tuple(words), gauss))


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


def load_checkpoint(
    folder: Path, logged: int, say: Callable[[str], None] = print
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest whole checkpoint whose `logged` bytes of metrics are there; None if there is none.

    Broken ones are put aside, which is said, and what a killed process left half written is removed.
    """
    for left in folder.glob(".step-*"):
        left.unlink(missing_ok=True)  # another process of the run may have done it
    for path in _checkpoints(folder):
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("neurocoder", "null"))
                # copied to where the allocator begins: products of some processors round by where numbers lie
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
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
            with suppress(FileNotFoundError):
                path.rename(path.with_name(f"corrupt-{path.name}"))
            say(f"{path.name} is corrupt ({error}): going back to the one before it, or to the start")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)
