"""Results that cannot get lost: merged, kept clean, taken out only when asked, whole whatever happens."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from neurocoder_lab import provenance, results
from neurocoder_lab.cli import main
from neurocoder_lab.errors import LabError

WORDS = ["sweep", "polynomial", "--budget", "smoke", "--setting", "plain"]


def made_up(model, seed, test=0.5, dirty=False, later=()):
    config = {"seed": seed, "budget": "desk", "model": model, "setting": "plain"}
    environment = {"commit": "abc", "dirty": dirty, "later": [{"commit": "abd", "dirty": value} for value in later]}
    return {"config": config, "final": {"test": test}, "curve": {}, "seconds": 1.0, "environment": environment}


def test_merging_replaces_the_same_run_and_keeps_the_others(tmp_path):
    results.merge(tmp_path, "polynomial", [made_up("linear", 0), made_up("linear", 1), made_up("film", 0)])
    results.merge(tmp_path, "polynomial", [made_up("linear", 1, test=0.1), made_up("film", 1)])
    known = results.load(tmp_path, "polynomial")
    assert sorted((r["config"]["model"], r["config"]["seed"]) for r in known) == [
        ("film", 0), ("film", 1), ("linear", 0), ("linear", 1),
    ]  # fmt: skip
    assert known.where(model="linear").values("test") == [0.5, 0.1]


def test_runs_of_uncommitted_code_are_left_out_unless_asked_for(tmp_path):
    results.merge(
        tmp_path,
        "polynomial",
        [made_up("linear", 0), made_up("linear", 1, dirty=True), made_up("linear", 2, later=[False, True])],
    )
    assert [run["config"]["seed"] for run in results.load(tmp_path, "polynomial")] == [0]
    assert len(results.load(tmp_path, "polynomial", dirty_too=True)) == 3


def test_a_sweep_beside_published_runs_leaves_them_and_names_dirty_ones(tmp_path, capsys, monkeypatch):
    folder, places = tmp_path / "results", ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    results.merge(folder, "polynomial", [made_up("film", 0), made_up("film", 1)])
    monkeypatch.setattr("neurocoder_lab.sweep._on_processes", in_this_process)
    monkeypatch.setattr(provenance, "source", lambda: {"commit": "abc", "dirty": True})
    assert main([*WORDS, "--model", "linear", "--seeds", "1", *places]) == 0
    told = capsys.readouterr()
    assert "linear.plain.smoke" in told.err
    assert "uncommitted changes" in told.err
    assert len(results.load(folder, "polynomial", dirty_too=True)) == 2
    assert main([*WORDS, "--model", "linear", "--seeds", "1", "--dirty", *places]) == 0
    known = results.load(folder, "polynomial", dirty_too=True)
    assert len(known) == 3
    assert len(known.where(model="film")) == 2


def in_this_process(workers, experiment):
    from neurocoder_lab import sweep

    return lambda jobs: ((job, sweep._one(job)) for job in jobs)


def test_the_tree_is_dirty_where_code_is_changed_or_new(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path, check=True)

    package = tmp_path / "src" / "neurocoder_lab"
    package.mkdir(parents=True)
    (package / "provenance.py").write_text("")
    (tmp_path / "README.md").write_text("")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "begin")
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    source = provenance.source.__wrapped__
    assert source()["dirty"] is False
    (tmp_path / "README.md").write_text("words are no code")
    assert source()["dirty"] is False
    (package / "new.py").write_text("")
    assert source()["dirty"] is True
    monkeypatch.setattr(provenance, "__file__", str(package / "new.py"))
    assert source() == {"commit": "unknown", "dirty": True}
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "site-packages" / "neurocoder_lab" / "provenance.py"))
    (tmp_path / "site-packages").mkdir()
    assert source() == {"commit": "unknown", "dirty": False}


def test_superseded_runs_are_taken_out_when_asked(tmp_path, capsys):
    results.merge(tmp_path, "polynomial", [made_up(model, seed) for model in ("linear", "film") for seed in range(3)])
    words = ["retract", "polynomial", "--results", str(tmp_path), "--model", "linear", "--seeds", "0", "2"]
    assert main(words) == 0
    assert "2 runs of 6 would be taken out" in capsys.readouterr().out
    assert len(results.load(tmp_path, "polynomial")) == 6
    assert main([*words, "--yes"]) == 0
    known = results.load(tmp_path, "polynomial")
    assert [(r["config"]["model"], r["config"]["seed"]) for r in known] == [
        ("linear", 1), ("film", 0), ("film", 1), ("film", 2),
    ]  # fmt: skip
    assert main(["retract", "polynomial", "--results", str(tmp_path), "--yes"]) == 0
    assert not (tmp_path / "polynomial.json").exists()


def test_runs_made_again_with_other_settings_are_not_pooled(tmp_path, capsys):
    old, new = ([made_up("linear", seed) for seed in range(2)] for _ in range(2))
    for place in new:
        place["config"]["rate"] = 0.5
    results.merge(tmp_path, "polynomial", old)
    results.merge(tmp_path, "polynomial", new)
    assert main(["claims", "--results", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "2 runs" in told
    assert "neurocoder retract polynomial --superseded" in told
    assert main(["retract", "polynomial", "--superseded", "--results", str(tmp_path), "--yes"]) == 0
    assert [run["config"].get("rate") for run in results.load(tmp_path, "polynomial")] == [0.5, 0.5]
    assert main(["claims", "--results", str(tmp_path)]) == 0


def test_what_is_superseded():
    def runs(rate, seeds, **more):
        plain = [made_up("linear", seed, **more) for seed in range(seeds)]
        return [run | {"config": run["config"] | {"rate": rate}} for run in plain]

    def left(*made):
        all_ = results.Runs(run for some in made for run in some)
        gone = results.superseded(all_, ["model", "setting"])
        return [(run["config"]["rate"], run["config"]["seed"]) for run in all_ if run not in gone]

    assert left(runs(0.1, 3), runs(0.5, 1)) == [(0.5, 0)]  # fewer new seeds are not pooled with more old ones
    assert left(runs(0.1, 2), runs(0.5, 2, dirty=True)) == [(0.1, 0), (0.1, 1)]
    assert left(runs(0.1, 1, dirty=True), runs(0.5, 1)) == [(0.5, 0)]


def test_settings_that_come_back_are_the_latest(tmp_path):
    def publish(rate):
        run = made_up("linear", 0)
        results.merge(tmp_path, "polynomial", [run | {"config": run["config"] | {"rate": rate}}])

    for rate in (0.1, 0.5, 0.1):
        publish(rate)
    known = results.load(tmp_path, "polynomial")
    (old,) = results.superseded(known, ["model", "setting"])
    assert old["config"]["rate"] == 0.5


MERGE = """
import sys, time
from pathlib import Path
from neurocoder_lab import results, store
def slowly(source, target):
    print("about to rename", flush=True)
    time.sleep(60)
store.os.replace = slowly
results.merge(Path(sys.argv[1]), "polynomial", [{"config": {"seed": 9}, "final": {}, "environment": {}}])
"""


def test_killed_while_it_writes_the_old_file_is_whole(tmp_path):
    results.merge(tmp_path, "polynomial", [made_up("linear", 0)])
    before = (tmp_path / "polynomial.json").read_text()
    writer = subprocess.Popen([sys.executable, "-c", MERGE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "about to rename\n"
    writer.kill()
    writer.wait()
    assert (tmp_path / "polynomial.json").read_text() == before
    results.merge(tmp_path, "polynomial", [made_up("linear", 1)])  # its lock died with it
    assert len(results.load(tmp_path, "polynomial")) == 2
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".poly")] == []


def add(folder, first):
    for seed in range(first, first + 10):
        results.merge(folder, "polynomial", [made_up("linear", seed)])


def test_two_writers_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add, args=(tmp_path, first)) for first in (0, 100)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(results.load(tmp_path, "polynomial")) == 20


def test_a_stopped_sweep_distils_what_is_finished(tmp_path):
    words = [sys.executable, "-m", "neurocoder_lab", *WORDS, "--model", "linear", "--seeds", "30", "--dirty"]
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    begun = subprocess.Popen([*words, *places], stderr=subprocess.PIPE, text=True)
    try:
        while not any((tmp_path / "runs").rglob("result.json")):
            assert begun.poll() is None
            time.sleep(0.05)
        os.kill(begun.pid, signal.SIGTERM)
        assert "the same command goes on" in begun.communicate(timeout=120)[1]
    finally:
        begun.kill()
    assert 0 < len(results.load(tmp_path / "results", "polynomial", dirty_too=True)) < 30


def test_a_retracted_run_is_run_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("neurocoder_lab.sweep._on_processes", in_this_process)
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    words = [*WORDS, "--model", "linear", "--seeds", "1", "--dirty", *places]
    assert main(words) == 0
    assert main(["retract", "polynomial", "--yes", *places]) == 0
    assert "1 runs taken out" in capsys.readouterr().out
    assert len([*(tmp_path / "runs" / "retracted").rglob("result.json")]) == 1
    assert main(words) == 0
    assert len(results.load(tmp_path / "results", "polynomial", dirty_too=True)) == 1
    assert len([*(tmp_path / "runs").rglob("result.json")]) == 2
    assert main(["retract", "polynomial", "--results", str(tmp_path / "nowhere")]) == 1
    assert "holds no results of polynomial" in capsys.readouterr().err


def test_a_results_file_that_is_cut_short_is_not_overwritten(tmp_path):
    (tmp_path / "polynomial.json").write_text('{"format": 1, "runs": [')
    with pytest.raises(LabError, match="not whole JSON"):
        results.merge(tmp_path, "polynomial", [made_up("linear", 0)])
    assert json.loads((tmp_path / "polynomial.json").read_text() + "]}")["runs"] == []
    (tmp_path / "polynomial.json").write_text('{"format": 1, "runs": [{"config": {"seed": 0}}]}')
    with pytest.raises(LabError, match="runs without config, environment, final"):
        results.load(tmp_path, "polynomial")


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([], "-"),
        ([0.5, 0.25], "0.375 ± 0.18 (2)"),
        ([500.0, 900.0], "700 ± 283 (2)"),
        ([12_000.0, 15_000.0], "13500 ± 2121 (2)"),
        ([2e-7, 2e-7], "2e-07 ± 0 (2)"),
        ([3e9, 3e9], "3e+09 ± 0 (2)"),
    ],
)
def test_numbers_are_shown_without_needless_powers_of_ten(values, shown):
    assert results.spread(values) == shown
