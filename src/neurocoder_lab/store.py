"""Files that survive a crash: written to a temporary file, flushed, renamed; and locks on folders."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neurocoder_lab.errors import LabError


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
