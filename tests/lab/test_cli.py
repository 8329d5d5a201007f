"""The command line where something is missing or asked wrongly."""

import sys

import pytest

from neurocoder_lab import __main__
from neurocoder_lab.cli import main


def test_without_the_laboratorys_packages_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "neurocoder_lab.cli")
    assert __main__.main() == 1
    assert capsys.readouterr().err == (
        "neurocoder: the laboratory needs tyro, which the library alone does not bring: pip install 'neurocoder[lab]' "
        "(in a checkout: pip install '.[lab]')\n"
    )


@pytest.mark.parametrize("words", [["--widths", "0"], ["--repeats", "0"], ["--widths", "512", "-3"]])
def test_a_benchmark_of_nothing_is_refused(words, capsys):
    assert main(["bench", *words]) == 1
    assert "must be at least 1" in capsys.readouterr().err
