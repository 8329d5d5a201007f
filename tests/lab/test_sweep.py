"""Sweeps on processes and on Ray: skipping, failing, dying, and equal results."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import neurocoder as nc
from neurocoder_lab import experiments, progress, results
from neurocoder_lab.cli import main
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments import polynomial, split_mnist
from neurocoder_lab.experiments.polynomial import Polynomial
from neurocoder_lab.run import folder_of
from neurocoder_lab.sweep import command_of, grid, sweep

EXPERIMENT = polynomial.EXPERIMENT


def configs(count: int = 3, **more) -> list[Polynomial]:
    options = {"budget": "smoke", "model": "linear", "iterations": 20} | more
    return [Polynomial(seed=seed, **options) for seed in range(count)]


def finals(runs: Path, chosen: list[Polynomial]) -> list[dict]:
    return [json.loads((folder_of(EXPERIMENT, c, runs) / "result.json").read_text())["final"] for c in chosen]


def test_a_grid_has_every_combination():
    configured = grid(EXPERIMENT, {"model": ("linear", "film"), "setting": ("plain", "noise")}, 3, budget="smoke")
    assert len({*configured}) == 12
    assert [config.seed for config in configured[:4]] == [0] * 4


def test_finished_runs_are_skipped_and_failures_listed(tmp_path):
    chosen = configs()
    assert all(outcome.error is None for outcome in sweep(EXPERIMENT, chosen[:1], tmp_path))
    stamp = (folder_of(EXPERIMENT, chosen[0], tmp_path) / "result.json").stat().st_mtime_ns
    bad = configs(1, iterations=20, rate=1e30)
    outcomes = sweep(EXPERIMENT, [chosen[0], *bad, *chosen[1:]], tmp_path, workers=2)
    assert [outcome.error is None for outcome in outcomes] == [True, False, True, True]
    assert "not finite" in outcomes[1].error
    assert (folder_of(EXPERIMENT, chosen[0], tmp_path) / "result.json").stat().st_mtime_ns == stamp
    assert finals(tmp_path, chosen)[0]["test"] != finals(tmp_path, chosen)[1]["test"]


def test_a_failure_may_be_long(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUROCODER_DATA", f"{tmp_path}/{'x' * 100_000}")  # more than a pipe holds
    config = split_mnist.EXPERIMENT.config(budget="smoke", model="mlp")
    (outcome,) = sweep(split_mnist.EXPERIMENT, [config], tmp_path)
    assert outcome.error is not None
    assert len(outcome.error) > 100_000


def kill_one(folder: Path, stop: threading.Event) -> None:
    """Kill the first process that locks a run's folder."""
    while not stop.is_set():
        for lock in folder.rglob("lock"):
            if (lock.parent / "metrics.jsonl").exists() and lock.read_text():
                os.kill(int(lock.read_text()), signal.SIGKILL)
                return
        time.sleep(0.01)


def test_a_killed_process_costs_nothing(tmp_path):
    chosen = configs(2, iterations=60)
    stop = threading.Event()
    killer = threading.Thread(target=kill_one, args=(tmp_path / "a", stop))
    killer.start()
    outcomes = sweep(EXPERIMENT, chosen, tmp_path / "a", workers=2, checkpoint_seconds=0.1)
    stop.set()
    killer.join()
    assert all(outcome.error is None for outcome in outcomes)
    sweep(EXPERIMENT, chosen, tmp_path / "b")
    assert finals(tmp_path / "a", chosen) == finals(tmp_path / "b", chosen)


def test_runs_see_the_environment_of_their_sweep(digits, tmp_path, monkeypatch):
    """Though the process that they are forked from was started in another one."""
    here = os.environ["NEUROCODER_DATA"]
    monkeypatch.setenv("NEUROCODER_DATA", str(tmp_path / "nowhere"))
    assert [outcome.error for outcome in sweep(EXPERIMENT, configs(1), tmp_path)] == [None]
    monkeypatch.setenv("NEUROCODER_DATA", here)
    looking = split_mnist.SplitMnist(model="mlp", budget="smoke", epochs=1)
    assert [outcome.error for outcome in sweep(split_mnist.EXPERIMENT, [looking], tmp_path)] == [None]


def test_runs_end_with_a_sweep_that_is_killed(tmp_path):
    words = ["sweep", "polynomial", "--model", "linear", "--setting", "plain", "--seeds", "2", "--workers", "2"]
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    begun = subprocess.Popen([sys.executable, "-m", "neurocoder_lab", *words, *places])
    try:
        while len([file for file in tmp_path.rglob("metrics.jsonl") if file.stat().st_size]) < 2:
            time.sleep(0.05)
        processes = [lock.read_text() for lock in tmp_path.rglob("lock")]
        assert begun.poll() is None
    finally:
        begun.kill()
        begun.wait()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in processes) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
    assert len([*tmp_path.rglob("step-*")]) == 2  # asked to stop, each wrote a checkpoint


@pytest.mark.parametrize("seen", ["", "lock", "metrics.jsonl"])
def test_an_interrupt_from_a_terminal_stops_a_sweep_without_a_traceback(tmp_path, seen):
    """It reaches every process: while the first of them imports, while a run starts, while it trains."""
    words = ["sweep", "polynomial", "--model", "linear", "--setting", "plain", "--seeds", "2"]
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "neurocoder_lab", *words, "--runs", str(runs), "--results", str(runs / "results")]
    begun = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while not any(runs.rglob(seen or "results")):
            assert begun.poll() is None
            time.sleep(0.02)
        time.sleep(0.5)
        os.killpg(begun.pid, signal.SIGINT)
        assert begun.communicate(timeout=120)[1] == "the sweep was stopped; the same command goes on\n"
        assert begun.returncode == 3
    finally:
        begun.kill()


def test_a_ray_cluster_that_loses_a_node_finishes_with_the_same_results(tmp_path):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        doomed = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        chosen = configs(4, iterations=150)
        runs = tmp_path / "ray"

        def kill() -> None:
            while len([*runs.rglob("metrics.jsonl")]) < 2:
                time.sleep(0.05)
            time.sleep(0.3)
            cluster.remove_node(doomed, allow_graceful=False)

        killer = threading.Thread(target=kill)
        killer.start()
        outcomes = sweep(EXPERIMENT, chosen, runs, cluster=cluster.address, checkpoint_seconds=0.2)
        killer.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [outcome.error for outcome in outcomes] == [None] * 4
    sweep(EXPERIMENT, chosen, tmp_path / "local")
    assert finals(runs, chosen) == finals(tmp_path / "local", chosen)


def test_the_command_sweeps_distils_and_reports(tmp_path, capsys):
    runs, page = tmp_path / "runs", tmp_path / "page.html"
    words = ["sweep", "polynomial", "--budget", "smoke", "--seeds", "1", "--model", "linear", "neurocoder-multi"]
    words += ["--setting", "plain", "--runs", str(runs), "--dirty", "--results", str(tmp_path)]
    assert main(words) == 0
    assert "2 of 2 runs finished" in capsys.readouterr().out
    published = results.load(tmp_path, "polynomial", dirty_too=True)
    assert [run["command"] for run in published] == [
        "neurocoder sweep polynomial --budget smoke --seeds 1 --model linear neurocoder-multi --setting plain"
    ] * 2
    assert main(words) == 0
    assert "2 of 2 runs are in" in capsys.readouterr().out
    assert main(["report", "--results", str(tmp_path), "--out", str(page), "--dirty"]) == 0
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "GRU alone" in text
    assert "budget-too-short" in text
    assert "<script" not in text
    assert not re.search(r"(src|href)=.?(https?:|//)", text)


def test_a_command_says_what_is_not_so_by_default():
    axes = {"model": ("a", "b"), "width": (1, 2, 3)}
    experiment = replace(EXPERIMENT, name="toy", axes=axes, main={"width": (1, 2)})
    plain = "neurocoder sweep toy --budget desk --seeds 2"
    assert command_of(experiment, {"model": ("b", "a"), "width": (2, 1)}, 2, "desk") == plain
    assert command_of(experiment, {"model": ("a",), "width": (3, 1)}, 2, "desk") == f"{plain} --model a --width 1 3"
    unset = replace(experiment, main={"width": (None,)})
    assert command_of(unset, {"model": ("a", "b"), "width": (None,)}, 2, "desk") == plain
    assert command_of(unset, {"model": ("a", "b"), "width": (1,)}, 2, "desk") == f"{plain} --width 1"


def test_the_report_has_the_commands_that_made_its_runs(tmp_path):
    def run(seed, **more):
        config = {"model": "linear", "setting": "plain", "seed": seed, "budget": "desk"}
        about = {"environment": {"commit": "abc", "versions": {"torch": "2"}}, "curve": {}, "seconds": 1.0}
        return {"config": config, "final": {"test": 0.5, "parameters": 3}} | about | more

    commands = [f"neurocoder sweep polynomial --seeds {seeds} --budget desk" for seeds in (2, 3)]
    runs = [run(0, command=commands[0]), run(1, command=commands[0]), run(2, command=commands[1]), run(3)]
    results.merge(tmp_path, "polynomial", runs)  # the last one is of a file without commands
    page = tmp_path / "page.html"

    def shown():
        assert main(["report", "--results", str(tmp_path), "--out", str(page)]) == 0
        return re.findall("<code>(.*?)</code>", page.read_text())

    assert shown() == commands
    results.retract(tmp_path, "polynomial", runs[2:3])
    assert shown() == commands[:1]


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "get", interrupted)
    assert main(["run", "polynomial"]) == 3
    assert capsys.readouterr().err == "stopped; what was finished is kept\n"


def test_what_is_asked_wrongly_is_said(tmp_path, capsys):
    assert main(["run", "polynomal"]) == 1
    assert "did you mean polynomial?" in capsys.readouterr().err
    assert main(["report", "--results", str(tmp_path / "none")]) == 1
    assert "is no folder of results" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["sweep", "polynomial", "--modle", "linear"])
    assert "--model" in capsys.readouterr().err
    assert main(["sweep", "polynomial", "--seeds", "0"]) == 1
    assert (
        main(
            [
                "sweep",
                "polynomial",
                "--seeds",
                "1",
                "--workers",
                "0",
                "--runs",
                str(tmp_path),
                "--results",
                str(tmp_path),
            ]
        )
        == 1
    )
    assert "--workers must be at least 1" in capsys.readouterr().err
    assert main(["swep", "polynomial"]) == 1
    assert "no command is called 'swep'; did you mean sweep?" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"neurocoder {nc.__version__}\n"
    assert main(["list"]) == 0
    assert "polynomial" in capsys.readouterr().out
    with pytest.raises(LabError):
        experiments.get("nothing of the kind")
    (tmp_path / "blocked").write_text("")
    assert main(["run", "polynomial", "--budget", "smoke", "--runs", str(tmp_path / "blocked")]) == 1
    assert "cannot be made" in capsys.readouterr().err


def test_a_log_gets_lines_instead_of_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINES", 0.0)
    with progress.Progress("sweep", 4, 1) as shown:
        shown.show(2, {"loss": 0.25}, "[one] failed")
    assert re.fullmatch(r"sweep 2/4, 0:00:\d\d left loss 0.25 \[one\] failed\n", capsys.readouterr().err)
