"""Which package may import what, and that a reader finds his way: no cycle, no long file, a word on every folder."""

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
FILES = sorted(SOURCE.rglob("*.py"))
LIBRARY = {"neurocoder", "torch", "safetensors"}
LONGEST = 350  # lines of a file


def name_of(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def imported(file: Path) -> set[str]:
    """What a file imports anywhere in it: at its top, inside of functions, for types alone."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: write imports in full"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner & MODULES.keys()
            if inner - MODULES.keys() or node.module not in MODULES:  # some name of the module itself
                names.add(node.module)
    return names


def needed(module: str) -> set[str]:
    """The modules of ours that one needs: a package it imports from stands for its `__init__`, unless it is inside."""
    needs = set()
    for name in imported(MODULES[module]) & MODULES.keys():
        parts = name.split(".")
        packages = {".".join(parts[:n]) for n in range(1, len(parts))}
        needs |= {name} | {package for package in packages if not f"{module}.".startswith(f"{package}.")}
    return needs


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One of them, from a name back to it; empty if there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(graph[name]):
                if around := walk(other, [*path, name]):
                    return around
            done.add(name)
        return []

    return next((around for name in graph if (around := walk(name, []))), [])


@pytest.mark.parametrize("package", ["neurocoder", "neurocoder_lab"])
def test_no_imports_go_round_in_a_circle(package):
    """Whether they are at the top of a file, inside of a function or for types alone."""
    graph = {name: needed(name) for name in MODULES if name.split(".")[0] == package}
    graph = {name: others & graph.keys() for name, others in graph.items()}
    assert cycle(graph) == []
    some = max(graph, key=lambda name: len(graph[name]))
    back = {name: others | {some} if name in graph[some] else others for name, others in graph.items()}
    assert len(cycle(back)) >= 3


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_reads_in_one_sitting(file):
    assert len(file.read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda folder: folder.name)
def test_every_folder_says_in_a_line_what_it_is_for(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert text
    assert text.splitlines()[0].endswith(".")


@pytest.mark.parametrize("file", sorted((SOURCE / "neurocoder").rglob("*.py")), ids=name_of)
def test_the_library_imports_torch_and_safetensors_only(file):
    outside = {name.split(".")[0] for name in imported(file)} - LIBRARY - set(sys.stdlib_module_names)
    assert not outside


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_unpickles(file):
    assert "pickle" not in imported(file)
    assert "torch.load" not in file.read_text()


def test_experiments_do_not_import_each_other():
    for file in (SOURCE / "neurocoder_lab" / "experiments").glob("*.py"):
        assert not any(name.startswith("neurocoder_lab.experiments") for name in imported(file)), file.name
