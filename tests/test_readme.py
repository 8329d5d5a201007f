"""The README's code runs as it stands, from top to bottom."""

import re
from pathlib import Path

from neurocoder.conditional import KINDS

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    scope = {}
    for block in blocks:
        exec(compile(block, README.name, "exec"), scope)
    assert "effective_rank" in capsys.readouterr().out
    assert scope["fresh"][2].memory.slots == scope["model"][2].memory.slots


def test_the_guide_to_continual_learning_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (README.parent / "docs" / "continual.md").read_text(), re.DOTALL)
    exec(compile(block, "continual.md", "exec"), {})
    assert "'forgetting'" in capsys.readouterr().out


def test_the_guide_to_a_layer_of_your_own_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (README.parent / "docs" / "peers.md").read_text(), re.DOTALL)
    scope = {"__name__": "guide"}
    try:
        exec(compile(block, "peers.md", "exec"), scope)
    finally:
        KINDS.pop("guide.Mixed", None)
    assert "guide.Mixed" in capsys.readouterr().out
    assert scope["model"][0].gate.weight.grad.any()


def test_every_file_of_the_library_is_in_the_layout():
    text = README.read_text()
    for file in (README.parent / "src").glob("*/[!_]*.py"):
        assert file.name in text
