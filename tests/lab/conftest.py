"""What all tests of the laboratory share."""

import pytest

from tests.lab import pictures


@pytest.fixture(autouse=True)
def no_results_of_others(tmp_path_factory, monkeypatch):
    """Commands leave their folder of results in the environment: every test begins with an empty one of its own."""
    monkeypatch.setenv("NEUROCODER_RESULTS", str(tmp_path_factory.mktemp("results")))


@pytest.fixture
def digits(tmp_path_factory, monkeypatch):
    """Small pictures of digits where the laboratory looks for the real ones."""
    folder = tmp_path_factory.getbasetemp() / "digits"
    for split, count in (("train", 600), ("test", 100)) if not folder.exists() else ():
        pictures.write(folder, "mnist", split, count)
    monkeypatch.setenv("NEUROCODER_DATA", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
