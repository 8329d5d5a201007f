"""The command line: quick where it has nothing to compute, and clear where something is missing or asked wrongly."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from neurocoder_lab import __main__, experiments
from neurocoder_lab.cli import main

LIGHT = """
import sys
from neurocoder_lab.cli import main
for words in (["--help"], ["list"], ["--version"], ["swep"], ["run", "polynomal"], ["run", "--help"], ["report", "-h"]):
    try:
        main(words)
    except SystemExit:
        pass
print(sorted({"torch", "accelerate", "scipy", "matplotlib"} & sys.modules.keys()))
"""


def test_what_only_tells_imports_nothing_slow():
    """Torch alone takes seconds; the rest together half of one."""
    told = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "[]"


def test_the_catalogue_names_every_experiment(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert [experiment.name for experiment in experiments.every()] == [*experiments.CATALOGUE]
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for name, entry in experiments.CATALOGUE.items():
        assert all(word in printed for word in (name, entry.reproduces, entry.summary[:40]))


def test_without_the_laboratorys_packages_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "neurocoder_lab.cli")
    assert __main__.main() == 1
    assert capsys.readouterr().err == (
        "neurocoder: the laboratory needs tyro, which the library alone does not bring: pip install 'neurocoder[lab]' "
        "(in a checkout: pip install '.[lab]')\n"
    )


def test_a_package_that_only_one_command_needs_is_named_too(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "neurocoder_lab.report", raising=False)
    monkeypatch.setattr(sys, "argv", ["neurocoder", "report", "--results", str(tmp_path)])
    assert __main__.main() == 1
    assert "the laboratory needs jinja2" in capsys.readouterr().err


def test_an_interrupt_while_torch_is_imported_is_no_traceback(tmp_path):
    words = [sys.executable, "-m", "neurocoder_lab", "run", "polynomial", "--runs", str(tmp_path)]
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background commands ignore it
    begun = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, preexec_fn=listening)
    try:
        while "libtorch" not in Path(f"/proc/{begun.pid}/maps").read_text():
            time.sleep(0.01)
        begun.send_signal(signal.SIGINT)
        assert begun.communicate(timeout=120)[1] == "stopped; what was finished is kept\n"
        assert begun.returncode == 3
    finally:
        begun.kill()


def test_a_run_takes_what_was_tuned_beside_other_results(tmp_path):
    tried = [{"values": {"rate": 0.007}, "mean": 1.0, "std": 0.0, "n": 3}]
    row = {"experiment": "polynomial", "place": {"model": "linear"}, "lower": True, "tried": tried}
    (tmp_path / "tuned.json").write_text(json.dumps([row]))
    words = ["run", "polynomial", "--budget", "smoke", "--model", "linear", "--iterations", "2"]
    assert main([*words, "--runs", str(tmp_path / "runs"), "--results", str(tmp_path)]) == 0
    (config,) = (tmp_path / "runs").rglob("config.json")
    assert json.loads(config.read_text())["config"]["rate"] == 0.007


def test_counting_parameters_into_a_file_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    words = [sys.executable, "-m", "neurocoder_lab.parameters", str(tmp_path / "file")]
    told = subprocess.run(words, capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (1, "")
    assert told.stderr == f"neurocoder: {tmp_path / 'file'} cannot be made: File exists; choose another folder\n"


@pytest.mark.parametrize("words", [["--widths", "0"], ["--repeats", "0"], ["--widths", "512", "-3"]])
def test_a_benchmark_of_nothing_is_refused(words, capsys):
    assert main(["bench", *words]) == 1
    assert "must be at least 1" in capsys.readouterr().err
