"""What all tests of the laboratory share."""

import pytest


@pytest.fixture(autouse=True)
def no_results_of_others(tmp_path_factory, monkeypatch):
    """Commands leave their folder of results in the environment: every test begins with an empty one of its own."""
    monkeypatch.setenv("NEUROCODER_RESULTS", str(tmp_path_factory.mktemp("results")))
