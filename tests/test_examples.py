"""Every example runs, at small size, and ends with what its docstring promises."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "adapt": ["--steps", "5"],
    "compare": ["--steps", "5", "--seeds", "2"],
    "continual": ["--steps", "5", "--out", "picture.png"],
    "digits": ["--out", "picture.png"],
    "look_inside": ["--steps", "5", "--out", "picture.png"],
}

pytestmark = pytest.mark.slow


def test_there_is_a_small_run_of_every_example():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*SMALL}


@pytest.mark.parametrize("name", SMALL)
def test_an_example(name, tmp_path, monkeypatch, capsys):
    file = EXAMPLES / f"{name}.py"
    text = file.read_text()
    assert len(text.splitlines()) <= 80
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("sys.argv", [str(file), *SMALL[name]])
    runpy.run_path(str(file), run_name="__main__")
    promised = re.findall(r"^    (\S+)", text.split('"""')[1], re.MULTILINE)  # the first words of the table's lines
    assert {*promised} <= {*capsys.readouterr().out.split()}
    assert (tmp_path / "picture.png").exists() == ("picture.png" in SMALL[name])
