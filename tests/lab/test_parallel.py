"""Data-parallel runs started by torchrun: two processes, the losses of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from neurocoder_lab.experiments import polynomial
from neurocoder_lab.experiments.polynomial import Polynomial
from neurocoder_lab.run import execute, folder_of

CONFIG = Polynomial(budget="smoke", iterations=10, model="neurocoder-multi")


def launched(runs: Path) -> list[dict]:
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--standalone",
        "-m",
        "neurocoder_lab",
    ]
    words += ["run", "polynomial", "--budget", "smoke", "--iterations", "10", "--runs", str(runs)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return rows(runs)


def rows(runs: Path) -> list[dict]:
    file = folder_of(polynomial.EXPERIMENT, CONFIG, runs) / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_two_processes_have_the_losses_of_one(tmp_path):
    execute(polynomial.EXPERIMENT, CONFIG, tmp_path / "one", quiet=True)
    one, two = rows(tmp_path / "one"), launched(tmp_path / "two")
    assert len(one) == len(two) == 10
    for a, b in zip(one, two, strict=True):
        assert a["step"] == b["step"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)  # float32 sums in another order, and Adam
        assert a["validation"] == pytest.approx(b["validation"], rel=1e-4)
    about = json.loads((folder_of(polynomial.EXPERIMENT, CONFIG, tmp_path / "two") / "environment.json").read_text())
    assert about["processes"] == 2
