"""The experiment toy-regression: its data, its likelihood, small runs of every training, and what is shown of them."""

from math import log, pi

import pytest
import torch
from torch import nn

import neurocoder as nc
from neurocoder_lab.cli import main
from neurocoder_lab.experiments import toy_regression
from neurocoder_lab.experiments.toy_regression import EXPERIMENT, MODELS, ToyRegression
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute
from tests.lab.small import distilled, same_when_stopped


def test_one_cluster_is_rotated_and_the_other_scaled():
    torch.manual_seed(0)
    x, y = toy_regression.problem(3.0)
    assert x.shape == y.shape == (3000, 2)
    first = x.sum(1) > 0  # so far apart that no point is on the wrong side
    assert 0.45 < first.float().mean() < 0.55
    torch.testing.assert_close(y[first].norm(dim=1), x[first].norm(dim=1))
    scaling = y[~first] / x[~first]
    torch.testing.assert_close(scaling, scaling[:1].expand_as(scaling), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(y[first] / x[first], scaling[: int(first.sum())][:1].expand(int(first.sum()), -1))


def test_the_likelihood_sums_over_both_modules():
    model = nn.Sequential(nc.modular.Linear(2, 2, bias=False, modules=2))
    with torch.no_grad():
        model[0].pool[0].weight.copy_(torch.eye(2))
        model[0].pool[1].weight.zero_()
        model[0].controller.weight.zero_()
        model[0].controller.bias.zero_()
    x = torch.zeros(4, 2)  # both make 0
    assert toy_regression.log_likelihood(model, x, x) == pytest.approx(-log(2 * pi * 0.05))
    x = torch.full((4, 2), 30.0)  # the second is far off
    assert toy_regression.log_likelihood(model, x, x) == pytest.approx(-log(2 * pi * 0.05) - log(2), rel=1e-5)


def test_smoke_runs_of_every_training_and_what_is_shown(tmp_path):
    runs = Runs()
    for model in MODELS:
        runs.append(distilled(EXPERIMENT, ToyRegression(budget="smoke", model=model), tmp_path))
        assert {*EXPERIMENT.metrics} <= runs[-1]["final"].keys()
        assert len(runs[-1]["curve"]["h_b"]) == 50
    assert {run["final"]["gradient_steps"] for run in runs} == {150}
    ((title, header, rows),) = toy_regression.tabulate(runs)
    assert title == "Toy regression, clusters apart, 150 gradient steps each"
    assert [row[0] for row in rows] == [toy_regression.NAMES[model] for model in MODELS]
    assert rows[0][header.index("solved")].endswith("of 1")
    drawn = toy_regression.draw(runs)
    assert [title[:6] for title, _ in drawn] == ["Fig 3a", "Fig 3b"]
    assert all(picture.startswith("<svg") for _, picture in drawn)


def test_em_solves_it(tmp_path):
    final = execute(EXPERIMENT, ToyRegression(iterations=1500, seed=1), tmp_path, quiet=True)["final"]
    assert toy_regression.solved(final)
    assert final["log_likelihood"] > 1.0  # two maps that fit: - ln(2 pi 0.05) = 1.16
    assert not toy_regression.solved(final | {"h_b": 0.1})


def test_stopped_and_resumed_it_is_the_same_run(tmp_path, monkeypatch):
    same_when_stopped(EXPERIMENT, ToyRegression(budget="smoke", iterations=40), tmp_path, monkeypatch, at=22)


def test_wrong_use_is_told(tmp_path, capsys):
    assert main(["run", "toy-regression", "--iterations", "0", "--runs", str(tmp_path)]) == 1
    assert "iterations must be at least 1" in capsys.readouterr().err
