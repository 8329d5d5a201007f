"""Where a number came from: commit, uncommitted changes, versions, machine, data."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from neurocoder_lab.store import read_json, write_json

PACKAGES = ("torch", "safetensors", "accelerate")
Precision = Literal["no", "bf16", "fp16"]  # what is mixed with float32


@cache
def source() -> dict[str, Any]:
    """Commit of the code, and whether the code differs from it: changed or new files beside this package.

    A package that was installed rather than checked out has no commit; its version tells what it is.
    """
    here = Path(__file__).resolve()

    def git(*words: str) -> str | None:
        try:
            told = subprocess.run(["git", *words], capture_output=True, text=True, cwd=here.parent.parent)
        except OSError:  # there is no git
            return None
        return told.stdout.strip() if told.returncode == 0 else None

    if git("ls-files", "--error-unmatch", str(here)) is None:
        return {"commit": "unknown", "dirty": "site-packages" not in here.parts}
    return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", "."))}


def processor() -> str:
    """The model of the processor where the system tells it, else its kind: ratios of times differ between models."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def environment(device: str, engine: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    """Where a run is: its code, its machine, how it runs (`engine`), and the fingerprint of its data."""
    from neurocoder import __version__  # a run has it; whoever only reads results does without torch

    return {
        **source(),
        "versions": {name: version(name) for name in PACKAGES} | {"neurocoder": __version__},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": device,
        **engine,
        "data": fingerprint,
    }


def note(file: Path, now: dict[str, Any]) -> None:
    """Keep in the file where a run began, and where else it went on."""
    known = read_json(file) if file.is_file() else now | {"later": []}
    if any(known.get(name) != value for name, value in now.items()) and now not in known["later"]:
        known["later"].append(now)
    write_json(file, known)


def dirty(environment: dict[str, Any]) -> bool:
    """Whether code that was not committed had a part in a run, when it began or when it was resumed."""
    return any(place.get("dirty", False) for place in (environment, *environment.get("later", [])))


def commit(environment: dict[str, Any]) -> str:
    """The commit a run began at, with a + if uncommitted code had a part in it."""
    return environment["commit"] + ("+" if dirty(environment) else "")
