"""Data-parallel runs started by torchrun: two processes, the losses of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from neurocoder_lab.experiments import polynomial
from neurocoder_lab.experiments.polynomial import Polynomial
from neurocoder_lab.run import execute, folder_of


def launch(config: Polynomial, runs: Path) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    words += ["-m", "neurocoder_lab", "run", "polynomial", "--budget", "smoke", "--model", config.model]
    done = subprocess.run([*words, "--iterations", str(config.iterations), "--runs", str(runs)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


# float32 sums in another order; Adam, and the choice of least-used slots, make more of it with every step
@pytest.mark.parametrize(("model", "steps", "tolerance"), [("linear", 20, 1e-5), ("neurocoder-multi", 4, 1e-4)])
def test_two_processes_have_the_losses_of_one(tmp_path, model, steps, tolerance):
    config = Polynomial(budget="smoke", iterations=steps, model=model)
    execute(polynomial.EXPERIMENT, config, tmp_path / "one", quiet=True)
    launch(config, tmp_path / "two")
    folders = [folder_of(polynomial.EXPERIMENT, config, tmp_path / runs) for runs in ("one", "two")]
    one, two = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in folders
    )
    assert len(one) == len(two) == steps
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=tolerance)
    assert json.loads((folders[1] / "environment.json").read_text())["processes"] == 2
