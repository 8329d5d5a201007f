"""Which package may import what."""

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
LIBRARY = {"neurocoder", "torch", "safetensors"}


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}: write imports in full"
            names.add(node.module)
    return names


@pytest.mark.parametrize("file", sorted((SOURCE / "neurocoder").rglob("*.py")), ids=lambda file: file.name)
def test_the_library_imports_torch_and_safetensors_only(file):
    outside = {name.split(".")[0] for name in imported(file)} - LIBRARY - set(sys.stdlib_module_names)
    assert not outside


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: file.name)
def test_nothing_unpickles(file):
    assert "pickle" not in imported(file)
    assert "torch.load" not in file.read_text()


def test_experiments_do_not_import_each_other():
    for file in (SOURCE / "neurocoder_lab" / "experiments").glob("*.py"):
        assert not any(name.startswith("neurocoder_lab.experiments") for name in imported(file)), file.name
