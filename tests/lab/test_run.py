"""The run engine: resuming to the bit, whatever happens to the process, the disk or the files."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from neurocoder_lab import checkpoints, run
from neurocoder_lab.errors import LabError, Stopped
from neurocoder_lab.run import execute, folder_of
from tests.lab.toy import EXPERIMENT, Toy, ToyTask

PAUSE = 0.02  # so that a run lasts long enough to be killed


def start(folder: Path, seconds: float = 0.0) -> subprocess.Popen:
    words = [sys.executable, "-m", "tests.lab.start_toy", str(folder), str(PAUSE), str(seconds)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def read(runs: Path) -> tuple[str, dict, dict]:
    folder = folder_of(EXPERIMENT, Toy(pause=PAUSE), runs)
    final = json.loads((folder / "result.json").read_text())["final"]
    return (folder / "metrics.jsonl").read_text(), final, load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing interrupts."""
    runs = tmp_path_factory.mktemp("whole")
    execute(EXPERIMENT, Toy(pause=PAUSE), runs, quiet=True)
    return read(runs)


def same(given, wanted) -> None:
    assert given[0] == wanted[0]
    assert given[1] == wanted[1]
    assert given[2].keys() == wanted[2].keys()
    assert all(torch.equal(given[2][name], tensor) for name, tensor in wanted[2].items())


def test_killed_ten_times_and_resumed_it_is_the_same_run(tmp_path, whole):
    moments = random.Random(0)
    folder = folder_of(EXPERIMENT, Toy(pause=PAUSE), tmp_path)
    kills = 0
    while kills < 10:
        process = start(tmp_path)
        before = len([*(folder / "checkpoints").glob("step-*")]) if folder.exists() else 0
        while process.poll() is None and not (len([*(folder / "checkpoints").glob("step-*")]) > min(before, 1)):
            time.sleep(0.01)  # it trains now: a kill while torch is imported would prove little
        time.sleep(moments.uniform(0, 0.12))
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
    assert start(tmp_path).wait() == 0
    assert kills >= 5
    same(read(tmp_path), whole)


def test_sigterm_writes_a_checkpoint_and_the_run_goes_on(tmp_path, whole):
    process = start(tmp_path, seconds=1000)
    folder = folder_of(EXPERIMENT, Toy(pause=PAUSE), tmp_path)
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 3
    assert "the same command goes on from there" in process.stderr.read()
    assert len([*(folder / "checkpoints").glob("step-*")]) == 1
    again = start(tmp_path, seconds=1000)
    assert again.wait() == 0
    assert "going on from step" in again.stderr.read()
    same(read(tmp_path), whole)


def interrupted(tmp_path, monkeypatch, at: int = 40):
    """A run in this process that ends with an error after step `at`, with a checkpoint after every step."""
    step = ToyTask.step

    def failing(self, index):
        if index == at:
            raise KeyboardInterrupt
        return step(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(ToyTask, "step", failing)
        with pytest.raises(KeyboardInterrupt):
            execute(EXPERIMENT, Toy(pause=PAUSE), tmp_path, checkpoint_seconds=0, quiet=True)
    return folder_of(EXPERIMENT, Toy(pause=PAUSE), tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_corrupt_checkpoint_gives_way_to_the_one_before_it(tmp_path, monkeypatch, capsys, whole, damage):
    folder = interrupted(tmp_path, monkeypatch)
    newest, older = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    content = bytearray(newest.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        content[-3] ^= 4
    newest.write_bytes(content)
    execute(EXPERIMENT, Toy(pause=PAUSE), tmp_path)
    said = capsys.readouterr().err
    assert f"{newest.name} is corrupt" in said
    assert f"going on from step {int(older.stem[5:])} of" in said
    same(read(tmp_path), whole)


def test_without_a_whole_checkpoint_it_starts_again_and_leaves_none_behind(tmp_path, monkeypatch, capsys, whole):
    folder = interrupted(tmp_path, monkeypatch)
    for path in (folder / "checkpoints").glob("step-*"):
        path.write_bytes(b"not a checkpoint")
    (folder / "checkpoints" / ".step-000000099.safetensors.1").write_text("left by a killed process")
    execute(EXPERIMENT, Toy(pause=PAUSE), tmp_path, checkpoint_seconds=0)
    assert capsys.readouterr().err.count("going back to the one before it, or to the start") == 2
    assert not (folder / "checkpoints").exists()
    same(read(tmp_path), whole)


def test_a_lost_log_makes_a_checkpoint_useless(tmp_path, monkeypatch, capsys, whole):
    folder = interrupted(tmp_path, monkeypatch)
    (folder / "metrics.jsonl").write_text("")
    execute(EXPERIMENT, Toy(pause=PAUSE), tmp_path)
    assert "the metrics logged before it are gone" in capsys.readouterr().err
    same(read(tmp_path), whole)


def test_a_run_does_not_go_on_with_other_data(tmp_path, monkeypatch, whole):
    folder = interrupted(tmp_path, monkeypatch)
    before = (folder / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(run, "restore", lambda *_: pytest.fail("it goes on"))
        patch.setattr(ToyTask, "attach", lambda self, accelerator: setattr(self, "fingerprint", "others"))
        with pytest.raises(LabError, match="began with other data"):
            execute(EXPERIMENT, Toy(pause=PAUSE), tmp_path, quiet=True)
    assert (folder / "metrics.jsonl").read_bytes() == before
    execute(EXPERIMENT, Toy(pause=PAUSE), tmp_path, quiet=True)
    same(read(tmp_path), whole)


def test_another_way_to_run_is_another_run(tmp_path):
    execute(EXPERIMENT, Toy(iterations=3), tmp_path, quiet=True)
    with pytest.raises(LabError, match="threads 1, now 2"):
        execute(EXPERIMENT, Toy(iterations=3), tmp_path, threads=2)
    torch.set_num_threads(1)
    with pytest.raises(LabError, match="threads must be at least 1"):
        execute(EXPERIMENT, Toy(iterations=3), tmp_path, threads=0)
    with pytest.raises(LabError, match="seed must not be negative"):
        Toy(seed=-1)


def test_a_second_process_in_the_folder_is_refused(tmp_path):
    first = start(tmp_path)
    folder = folder_of(EXPERIMENT, Toy(pause=PAUSE), tmp_path)
    while not (folder / "metrics.jsonl").exists():
        time.sleep(0.02)
    with pytest.raises(LabError, match=f"process {first.pid} is running in"):
        execute(EXPERIMENT, Toy(pause=PAUSE), tmp_path)
    assert first.wait() == 0


def test_a_full_disk_while_checkpointing_leaves_the_earlier_ones(tmp_path, monkeypatch, whole):
    folder = interrupted(tmp_path, monkeypatch)
    before = {path: path.read_bytes() for path in (folder / "checkpoints").iterdir()}

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half of it")
        raise checkpoints.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full)
        with pytest.raises(LabError, match=r"no space left while writing .* what was there before is whole"):
            execute(EXPERIMENT, Toy(pause=PAUSE), tmp_path, checkpoint_seconds=0, quiet=True)
    assert {path: path.read_bytes() for path in (folder / "checkpoints").iterdir()} == before
    execute(EXPERIMENT, Toy(pause=PAUSE), tmp_path, quiet=True)
    same(read(tmp_path), whole)


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/dev/full").exists(), reason="mounting a small disk takes root")
def test_a_disk_that_is_really_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not allow it")
    try:
        with pytest.raises(LabError, match="no space left"):
            execute(EXPERIMENT, Toy(), disk, checkpoint_seconds=0, quiet=True)
        left = [*folder_of(EXPERIMENT, Toy(), disk).glob("checkpoints/*")]
        assert all(path.name.startswith("step-") for path in left)
        for path in left:
            assert checkpoints.load_checkpoint(path.parent, 10**9) is not None
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="cannot be made: Not a directory; choose another folder"):
        execute(EXPERIMENT, Toy(), tmp_path / "file")
    with pytest.raises(LabError, match=r"cannot be (made|written to)"):
        execute(EXPERIMENT, Toy(), Path("/proc/nowhere"))


def test_a_config_of_another_version_or_run_is_refused(tmp_path):
    execute(EXPERIMENT, Toy(iterations=3), tmp_path, quiet=True)
    folder = folder_of(EXPERIMENT, Toy(iterations=3), tmp_path)
    stored = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"config": stored["config"] | {"momentum": 1}}, "from another version .it differs in momentum"),
        ({"format": 99}, "from another version .it differs in its format"),
        ({"config": stored["config"] | {"pause": 3.0}}, "another config .pause 3.0, now 0.0"),
    ):
        (folder / "config.json").write_text(json.dumps(stored | change))
        with pytest.raises(LabError, match=message):
            execute(EXPERIMENT, Toy(iterations=3), tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(LabError, match="not whole JSON"):
        execute(EXPERIMENT, Toy(iterations=3), tmp_path)


def test_a_finished_run_is_not_run_again_and_says_where_it_came_from(tmp_path):
    first = execute(EXPERIMENT, Toy(iterations=3), tmp_path, quiet=True)
    assert execute(EXPERIMENT, Toy(iterations=3), tmp_path, quiet=True) == first
    folder = folder_of(EXPERIMENT, Toy(iterations=3), tmp_path)
    assert folder == tmp_path / "toy" / "em.desk.iterations-3" / "seed-0"
    about = json.loads((folder / "environment.json").read_text())
    assert {"commit", "dirty", "versions", "threads", "data"} <= about.keys()
    assert first["final"]["steps"] == 3


def test_one_seed_fixes_everything(tmp_path):
    finals = [
        execute(EXPERIMENT, Toy(iterations=9, seed=s), tmp_path / str(n), quiet=True)["final"]
        for n, s in enumerate((1, 1, 2))
    ]
    assert finals[0] == finals[1] != finals[2]


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyTask, "step", lambda self, index: {"loss": torch.tensor(float("nan"))})
    with pytest.raises(LabError, match="loss is not finite after step 7: lower the learning rate"):
        execute(EXPERIMENT, Toy(), tmp_path, quiet=True)


def test_names_from_outside_do_not_leave_the_folder():
    config = Toy(model="../../etc")
    assert folder_of(EXPERIMENT, config, Path("runs")).parts[:2] == ("runs", "toy")
    assert "/" not in EXPERIMENT.label(config)


def test_stopped_is_not_an_error_of_the_lab():
    assert not issubclass(Stopped, LabError)
    assert run.CONFIG_FORMAT == 1
