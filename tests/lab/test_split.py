"""Split MNIST and Split CIFAR as experiments, on small pictures of the same layout: resuming, sharing, refusing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import neurocoder as nc
from neurocoder_lab import experiments
from neurocoder_lab.cli import main
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments import split_cifar, split_mnist
from neurocoder_lab.experiments.split_cifar import SplitCifar
from neurocoder_lab.experiments.split_mnist import SplitMnist
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute, folder_of
from tests.lab import pictures

EXPERIMENT = split_mnist.EXPERIMENT


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Data and cache in a folder of the tests' own; as environment variables."""
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("train", 600), ("test", 100)):
        pictures.write(folder, "mnist", split, count)
        pictures.write(folder, "cifar10", split, count // 10, size=32)
    return {"NEUROCODER_DATA": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture(autouse=True)
def _here(places, monkeypatch):
    for name, value in places.items():
        monkeypatch.setenv(name, value)


def command(config: SplitMnist, runs: Path, *words: str) -> list[str]:
    chosen = [f"--{name}={getattr(config, name)}" for name in ("model", "method", "scenario", "epochs", "budget")]
    chosen += [f"--examples={config.examples}"] if config.examples else []
    return [*words, "-m", "neurocoder_lab", "run", "split-mnist", *chosen, "--runs", str(runs)]


def final(config: SplitMnist, runs: Path) -> dict:
    return json.loads((folder_of(EXPERIMENT, config, runs) / "result.json").read_text())["final"]


@pytest.mark.parametrize(("model", "method", "scenario"), [("neurocoder", "si", "task"), ("nsm", "ewc", "domain")])
def test_killed_in_the_third_task_it_ends_with_the_same_matrix(tmp_path, model, method, scenario):
    config = SplitMnist(model=model, method=method, scenario=scenario, epochs=25, budget="smoke")
    whole = execute(EXPERIMENT, config, tmp_path / "whole", quiet=True)["final"]
    killed = tmp_path / "killed"
    process = subprocess.Popen([*command(config, killed, sys.executable), "--checkpoint-seconds", "0"])
    log = folder_of(EXPERIMENT, config, killed) / "metrics.jsonl"

    def newest() -> int:
        return max(int(file.stem.removeprefix("step-")) for file in (log.parent / "checkpoints").glob("step-*"))

    while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) >= 2):
        time.sleep(0.01)
    begun = newest()
    while process.poll() is None and newest() < begun + 2:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert len(log.read_text().splitlines()) == 2, "it was to be killed in the third task"
    again = subprocess.run(command(config, killed, sys.executable), capture_output=True, text=True)
    assert "going on from step" in again.stderr
    assert final(config, killed) == whole
    assert len(whole["matrix"]) == 6
    assert whole["learned"] > 80


def test_two_processes_learn_what_one_does(tmp_path):
    config = SplitMnist(model="neurocoder", method="oewc", scenario="task", epochs=2, examples=600, budget="smoke")
    one = execute(EXPERIMENT, config, tmp_path / "one", quiet=True)["final"]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    done = subprocess.run(command(config, tmp_path / "two", *words), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    two = final(config, tmp_path / "two")
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
    assert two["accuracy"] == pytest.approx(one["accuracy"], abs=3)


@pytest.mark.parametrize("model", split_mnist.MODELS)
@pytest.mark.parametrize("scenario", ["task", "class"])
def test_every_model_runs_in_every_scenario(tmp_path, model, scenario):
    config = SplitMnist(model=model, method="adagrad", scenario=scenario, budget="smoke", measure="validation")
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert 0 <= final["accuracy"] <= 100
    assert final["forgetting"] >= -100


def test_sizes_are_the_papers():
    sizes = {
        model: sum(p.numel() for p in split_mnist.build(model, "domain", 256).parameters())
        for model in split_mnist.MODELS
    }
    assert sizes["mlp"] == pytest.approx(328_000, rel=0.01)
    assert sizes["neurocoder"] == pytest.approx(348_000, rel=0.02)


def test_split_cifar_runs_on_features(tmp_path):
    config = SplitCifar(budget="smoke", method="si", model="plain", rate=0.001, penalty=100.0)
    final = execute(split_cifar.EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert len(final["matrix"]) == 6
    assert {*split_cifar.EXPERIMENT.metrics} <= final.keys()
    assert main(["run", "split-cifar", "--budget", "smoke", "--runs", str(tmp_path)]) == 0
    assert main(["sweep", "split-mnist", "--budget", "smoke", "--seeds", "1", "--model", "mlp", "--method", "adam",
                 "--runs", str(tmp_path), "--results", str(tmp_path), "--dirty"]) == 0  # fmt: skip
    runs = Runs(json.loads((tmp_path / "split-mnist.json").read_text())["runs"])
    assert {run["config"]["scenario"] for run in runs} == {"task", "domain"}
    tables = split_mnist.tabulate(runs)
    assert [row[0] for _, _, rows in tables for row in rows] == ["Adam", "Adam"]
    assert "93.75 ± 3.28" in tables[0][2][0]
    assert all(picture.startswith("<svg") for _, picture in split_mnist.draw(runs))


def test_a_table_tells_the_tuned_penalties_beside_plain_training():
    def run(**config):
        return {"config": {"hidden": 256, "scenario": "class", "model": "mlp"} | config, "final": {"accuracy": 50.0}}

    runs = [run(method="l2", strength="tuned", penalty=0.1), run(method="adam", strength="benchmark", penalty=0.0)]
    title, header, rows = split_mnist.tabulate(Runs(runs))[1]
    assert "tuned" in title
    assert header == ["method", "MLP"]
    assert rows == [["Adam", "50 (1)"], ["L2", "50 (1), λ = 0.1"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["split-mnist", "--epochs", "0"], "epochs must be at least 1"),
        (["split-mnist", "--method", "ewc", "--penalty", "-1"], "penalty must be a number that is not negative"),
        (["split-mnist", "--method", "ewc", "--penalty", "inf"], "penalty must be a number that is not negative"),
        (["split-mnist", "--checkpoint-seconds", "nan"], "must not be negative, got nan"),
        (["split-mnist", "--method", "ewc", "--scenario", "class"], "use --strength tuned"),
        (["split-mnist", "--method", "ewc", "--strength", "tuned", "--hidden", "400"], "tuned for 256 hidden units"),
        (["split-mnist", "--method", "adam", "--penalty", "3"], "adam has no penalty"),
        (["split-mnist", "--examples", "3"], "--examples 3 are too few"),
        (["split-cifar", "--weights", "some"], "no other backbone does"),
        (["split-cifar", "--rate", "0"], "rate must be a positive number"),
        (["split-cifar", "--backbone", "resnet18"], "resnet18 needs --weights"),
        (["split-cifar", "--backbone", "resnet18", "--weights", "nowhere"], "nowhere cannot be read"),
        (["split-cifar", "--penalty", "3"], "no penalty"),
        (["split-cifr"], "did you mean split-cifar"),
    ],
)
def test_wrong_use_is_told(tmp_path, capsys, words, said):
    assert main(["run", *words, "--runs", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


def test_absent_data_says_what_to_do(tmp_path):
    program = "from neurocoder_lab.cli import main; raise SystemExit(main(['run', 'split-mnist', '--runs', '.']))"
    places = {"NEUROCODER_DATA": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | places, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "set NEUROCODER_DATA" in done.stderr


def test_the_experiments_are_listed():
    assert {"split-mnist", "split-cifar"} <= {experiment.name for experiment in experiments.every()}
    with pytest.raises(LabError, match="did you mean split-mnist"):
        experiments.get("split-mnst")
    assert isinstance(split_mnist.build("mlp", "task", 256)(torch.zeros(1, 1024), 4), torch.Tensor)


def test_the_two_forms_of_the_neurocoder():
    ours = split_mnist.EXPERIMENT.resolve(SplitMnist(model="neurocoder", method="oewc"))
    theirs = split_mnist.EXPERIMENT.resolve(SplitMnist(model="neurocoder-authors", method="oewc"))
    assert (theirs.sharpness, theirs.orthogonal) == (1 / 5, 1.0)
    networks = [split_mnist.build(c.model, "domain", 256, c.sharpness) for c in (ours, theirs)]
    assert [network[0].sharpness for network in networks] == [ours.sharpness, 1 / 5]
    assert networks[1][0].rules == nc.Rules.authors(1)
    plain = split_mnist.EXPERIMENT.resolve(SplitMnist(model="mlp"))
    assert (plain.sharpness, plain.orthogonal) == (0.0, 0.0)
    with pytest.raises(LabError, match="mlp has no sharpness"):
        SplitMnist(model="mlp", sharpness=1.0)
    with pytest.raises(LabError, match="sharpness must be positive"):
        SplitMnist(sharpness=0.0)


def test_the_authors_weights_of_the_orthogonal_loss():
    for method, wanted in (("adam", [1, 1]), ("oewc", [1, 2]), ("si", [0, 1])):
        config = split_mnist.EXPERIMENT.resolve(
            SplitMnist(budget="smoke", model="neurocoder-authors", method=method, epochs=1)
        )
        learner = split_mnist.start(config)
        assert [learner.weight(task) for task in (0, 1)] == wanted
