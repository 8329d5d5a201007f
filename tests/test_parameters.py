"""The sizes of the papers' models: every cell of Table 7 that can be built is counted, and the claim can fail."""

import pytest

from neurocoder_lab import claims, papers, parameters, results

FROM_THE_PAPERS = {  # cells whose widths and settings the papers give
    ("MNIST linear", "original"), ("MNIST linear", "Neurocoder"), ("CIFAR MLP", "original"),
    ("CIFAR DenseNet", "original"), ("CIFAR DenseNet", "Neurocoder"), ("polynomial GRU", "original"),
    ("polynomial GRU", "HyperNet"), ("polynomial GRU", "FiLM"), ("polynomial GRU", "Neurocoder single"),
    ("polynomial GRU", "Neurocoder multi"), ("Atari LSTM", "original"), ("Split MNIST MLP", "original"),
    ("Split MNIST MLP", "Neurocoder"),
}  # fmt: skip


def test_the_numbers_are_those_of_the_claim():
    (claim,) = [claim for claim in papers.published() if claim["id"] == "nc-params"]
    for cell in parameters.cells():
        assert claim["paper"][cell.task.lower()][cell.model.lower()] == cell.paper


def sizes(folder):
    (claim,) = [claim for claim in claims.judge(folder) if claim.id == "nc-params"]
    return claim


@pytest.mark.slow
def test_every_cell_counts_and_the_claim_can_fail(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(parameters, "source", lambda: {"commit": "abc", "dirty": False})
    parameters.main(tmp_path)
    printed = capsys.readouterr().out
    assert all(f"{cell.count():,.0f}" in printed for cell in parameters.cells())
    found = results.load(tmp_path, "parameters")
    assert len(found) == len(parameters.cells()) == 31
    within = {(run["config"]["task"], run["config"]["model"]) for run in found if abs(run["final"]["away"]) <= 0.05}
    assert within >= FROM_THE_PAPERS
    assert sizes(tmp_path).verdict == "contradicted"
    assert f"{len(within)} of 31 cells within 5%" in sizes(tmp_path).ours
    results.replace(tmp_path, "parameters", [run | {"final": run["final"] | {"away": 0.05}} for run in found])
    assert sizes(tmp_path).verdict == "holds"
