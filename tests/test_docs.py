"""What the documentation says is so: its code runs, its commands exist, its reference is whole, its site builds."""

import re
import shlex
import warnings
from functools import wraps
from importlib import import_module
from pathlib import Path

import pytest
import tyro
from sphinx.cmd.build import build_main

from neurocoder.conditional import KINDS
from neurocoder_lab.cli import main

ROOT = Path(__file__).parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
BLOCK = r"(?ms)^```(python|output)\n(.*?)^```"
CODE = {name: blocks for name, text in PAGES.items() if (blocks := re.findall(BLOCK, text))}


@pytest.mark.parametrize("page", CODE)
def test_code_runs_as_it_stands(page, tmp_path, monkeypatch, capsys):
    """The blocks of a page, from top to bottom, in one namespace; an output is what the code before it printed."""
    monkeypatch.chdir(tmp_path)
    kinds, scope = dict(KINDS), {"__name__": "guide"}
    try:
        for kind, block in CODE[page]:
            if kind == "output":
                assert capsys.readouterr().out == block
            else:
                for name in re.findall(r'register\("(.+?)"\)', block):
                    KINDS.pop(name, None)  # somebody did as the page says
                exec(compile(block, page, "exec"), scope)
    finally:
        KINDS.clear()
        KINDS.update(kinds)


def test_there_is_code_to_run():
    assert len(CODE["README.md"]) == 5
    assert {"docs/guides/recode.md", "docs/guides/peers.md", "docs/guides/continual.md"} <= CODE.keys()
    assert any(kind == "output" for kind, _ in CODE["docs/guides/recode.md"])


def commands(start: str) -> list[str]:
    """Every command of all pages that starts so, in a plain block or in the text, without what explains it."""
    lines, spans = [], []
    for text in PAGES.values():
        text = re.sub(r"(?ms)^```[^\n`]+\n.*?^```$", "", text)
        lines += [line for block in re.findall(r"(?ms)^```\n(.*?)^```$", text) for line in block.splitlines()]
        spans += re.findall(r"`([^`]+)`", re.sub(r"(?ms)^```\n.*?^```$", "", text))
    told = [re.split(r"\s{2,}| #", line.strip())[0] for line in lines] + [" ".join(span.split()) for span in spans]
    return sorted({command for command in told if re.match(rf"{start}\s", command)})


class Parsed(Exception):
    pass


def test_commands_of_the_laboratory_are_understood(monkeypatch):
    cli, choose = tyro.cli, tyro.extras.subcommand_cli_from_dict

    def parse(*args, **kwargs):
        cli(*args, **kwargs)
        raise Parsed

    def parse_one(functions, **kwargs):
        choose({name: wraps(function)(lambda **_: None) for name, function in functions.items()}, **kwargs)
        raise Parsed

    monkeypatch.setattr(tyro, "cli", parse)
    monkeypatch.setattr(tyro.extras, "subcommand_cli_from_dict", parse_one)
    told = [command for command in commands("neurocoder") if "parity" not in command]  # which CONTRIBUTING adds
    assert len(told) > 10
    for command in told:
        with pytest.raises(Parsed):
            main(shlex.split(command)[1:])
    with pytest.raises(SystemExit):  # it can fail
        main(["run", "polynomial", "--slots", "3"])


def test_scripts_and_targets_exist():
    targets = re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text())
    assert {command.split()[1] for command in commands("make")} <= {*targets}
    for command in commands(r"python benchmarks/\w+.py"):
        script, *words = shlex.split(command)[1:]
        text = (ROOT / script).read_text()
        for option in (word for word in words if word.startswith("--")):
            assert option.strip("-").replace("-", "_") in text, f"{script} has no {option}"


def test_the_readme_is_short_and_names_every_folder():
    layout = PAGES["README.md"].partition("## Layout")[2]
    inside = [package.parent for package in (ROOT / "src").rglob("__init__.py")]
    beside = [ROOT / name for name in ("benchmarks", "docs", "examples", "results", "tests")]
    assert [folder.name for folder in inside + beside if folder.exists() and f"{folder.name}/" not in layout] == []
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_the_site_builds_without_a_warning_knows_every_public_name_and_needs_no_other_host(tmp_path):
    strict = ("--quiet", "--fail-on-warning", "--keep-going", "--nitpicky")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # between Sphinx and its extensions
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        assert build_main([*strict, str(ROOT / "docs"), str(tmp_path)]) == 0
    pages = {page.relative_to(tmp_path): page.read_text() for page in tmp_path.rglob("*.html")}
    known = {
        anchor.removeprefix("module-") for text in pages.values() for anchor in re.findall(r'id="([\w.-]+)"', text)
    }
    for module in ("neurocoder", "neurocoder.peers", "neurocoder.modular", "neurocoder_lab.continual"):
        assert {f"{module}.{name}" for name in import_module(module).__all__} - known == set()
    for page, text in pages.items():
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text):
            assert "//" not in tag, f"{page}: {tag}"
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text()), style.name
