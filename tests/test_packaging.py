"""The wheel holds all that is needed, and works where the checkout is not: the README's first snippet, the command."""

import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

import neurocoder

ROOT = Path(__file__).parent.parent
DATA = {"neurocoder/py.typed", "neurocoder_lab/py.typed"}
DATA |= {f"neurocoder_lab/{name}" for name in ("claims.json", "tuned.json", "report.html.jinja")}

pytestmark = pytest.mark.slow


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run([*words], cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_every_file_is_in_the_wheel(wheel):
    inside = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src").rglob("*.py")}
    assert inside == modules | DATA


def test_the_wheel_works_by_itself(wheel, tmp_path):
    venv.create(tmp_path / "own")
    python = tmp_path / "own" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (packages,) = (tmp_path / "own" / "lib").glob("*/site-packages")
    (packages / "torch.pth").write_text("\n".join(site.getsitepackages()))  # no editable install is followed from there
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    told = run(python, "-c", f"{snippet}\nprint(nc.__file__, nc.__version__)", cwd=tmp_path).split()
    assert Path(told[-2]).is_relative_to(packages)
    assert told[-1] == neurocoder.__version__ == wheel.name.split("-")[1]
    command = tmp_path / "own" / "bin" / "neurocoder"
    assert neurocoder.__version__ in run(command, "--version", cwd=tmp_path)
    assert "polynomial" in run(command, "list", cwd=tmp_path)
