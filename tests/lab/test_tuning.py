"""Tuning: several settings at once, several seeds, a named metric; written beside the results."""

import json
from dataclasses import replace

import pytest

from neurocoder_lab import results, search, sweep, tuning
from neurocoder_lab.cli import main
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments import polynomial
from neurocoder_lab.experiments.split_mnist import EXPERIMENT as SPLIT
from neurocoder_lab.experiments.split_mnist import SplitMnist
from neurocoder_lab.results import deviation
from neurocoder_lab.run import folder_of
from neurocoder_lab.task import Grid


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(sweep, "_on_processes", lambda *_: lambda jobs: ((job, sweep._one(job)) for job in jobs))


def grid(values, **more):
    fixed = {"budget": "smoke", "iterations": 20}
    return Grid({"model": ("linear",)}, lambda place: values, fixed, "validation", lower=True, last=3, **more)


def row(tried, lower=False, **place):
    about = {"experiment": "split-mnist", "metric": "accuracy", "lower": lower, "last": 1, "across": {}, "commits": []}
    return about | {"place": place, "tried": [{"values": v, "mean": m, "std": 0.0, "n": n} for v, m, n in tried]}


def test_the_best_mean_over_seeds_and_last_evaluations_is_chosen(tmp_path, in_this_process, capsys):
    experiment = replace(polynomial.EXPERIMENT, grids=[grid({"rate": (1e-6, 0.01, 1e30)})])
    with pytest.raises(LabError, match="3 runs failed"):
        search.tune(experiment, tmp_path / "runs", tmp_path / "results", seeds=3, workers=1)
    (place,) = json.loads((tmp_path / "results" / "tuned.json").read_text())
    assert [tried["n"] for tried in place["tried"]] == [3, 3, 0]  # a rate that blows up is told, and not chosen
    with results.at(tmp_path / "results"):
        assert tuning.best("polynomial", "rate", model="linear") == 0.01
    scores = []
    for seed in range(3):
        config = experiment.resolve(
            experiment.config(seed=seed, model="linear", budget="smoke", iterations=20, rate=0.01)
        )
        lines = (folder_of(experiment, config, tmp_path / "runs") / "metrics.jsonl").read_text().splitlines()
        scores.append(sum(json.loads(line)["validation"] for line in lines[-3:]) / 3)
    assert place["tried"][1]["mean"] == pytest.approx(sum(scores) / 3, abs=1e-6)
    assert place["tried"][1]["std"] == pytest.approx(deviation(scores), abs=1e-6)
    printed = capsys.readouterr()
    assert "linear: rate 0.01, validation" in printed.out
    assert "rate 1e+30: failed" in printed.out
    assert "at the end of its grid" not in printed.out
    assert "not finite" in printed.err


def test_several_settings_are_tried_together_across_an_axis(tmp_path, in_this_process):
    both = grid({"rate": (0.001, 0.01), "iterations": (5, 10)}, across={"setting": ("plain", "noise")})
    both = replace(both, fixed={"budget": "smoke"})
    search.tune(replace(polynomial.EXPERIMENT, grids=[both]), tmp_path / "runs", tmp_path, seeds=3, workers=1)
    (place,) = json.loads((tmp_path / "tuned.json").read_text())
    assert len(place["tried"]) == 4
    assert {tried["n"] for tried in place["tried"]} == {6}
    with results.at(tmp_path):
        assert tuning.best("polynomial", "iterations", model="linear") in (5, 10)


def test_a_ladder_is_climbed_until_the_best_has_neighbours(tmp_path, in_this_process):
    rates = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 1e30)  # the last one blows up
    climbed = replace(polynomial.EXPERIMENT, grids=[grid({"rate": rates}, ladder=True)])
    with pytest.raises(LabError, match="3 runs failed"):
        search.tune(climbed, tmp_path / "runs", tmp_path, seeds=3, workers=1)
    (place,) = json.loads((tmp_path / "tuned.json").read_text())
    assert [tried["values"]["rate"] for tried in place["tried"]] == [*rates[2:]]
    with results.at(tmp_path):
        assert tuning.best("polynomial", "rate", model="linear") == 0.01


@pytest.mark.parametrize(
    ("score", "wanted", "most"),
    [
        (lambda a, b: -abs(a - 2), {"a": 2}, 6),
        (lambda a, b: -abs(a - 12), {"a": 12}, 7),
        (lambda a, b: 9 if a == 3 else 8 if a == 4 else 5, {"a": 3}, 5),  # flat elsewhere
        (lambda a, b: 1.0, None, 5),  # flat everywhere
        (lambda a, b: -abs(a - 7) - 3 * abs(b - 2), {"a": 7, "b": 2}, 10),
        (lambda a, b: -abs(a - 7) - 3 * abs(b), {"a": 7, "b": 0}, 10),
    ],
)
def test_a_ladder_starts_wide_and_finds_the_top(score, wanted, most):
    values = {"a": tuple(range(13)), "b": (0, 1, 2)}
    if wanted is None or "b" not in wanted:
        values.pop("b")
    ladder = Grid({}, lambda place: values, {}, "accuracy", ladder=True)
    tried = {"place": {}, "lower": False, "tried": []}
    asked = search._first(ladder, {})
    assert {one["a"] for one in asked} == {3, 6, 9}
    while asked:
        tried["tried"] += [{"values": one, "n": 3, "mean": score(one["a"], one.get("b"))} for one in asked]
        asked = search._next(ladder, tried)
    names = [one["values"] for one in tried["tried"]]
    assert len(names) <= most
    assert not [one for one in names if names.count(one) > 1]
    assert wanted in (None, tuning.chosen(tried)["values"])


def test_what_is_tuned_beside_the_results_comes_before_the_package(tmp_path, monkeypatch):
    place = {"scenario": "domain", "model": "mlp", "method": "l2"}
    packaged = SPLIT.resolve(SplitMnist(**place, strength="tuned")).penalty
    monkeypatch.setenv("NEUROCODER_RESULTS", str(tmp_path))
    assert SPLIT.resolve(SplitMnist(**place, strength="tuned")).penalty == packaged
    (tmp_path / "tuned.json").write_text(json.dumps([row([({"penalty": 7.0}, 1.0, 3)], **place)]))
    assert SPLIT.resolve(SplitMnist(**place, strength="tuned")).penalty == 7.0
    other = place | {"method": "si"}
    assert SPLIT.resolve(SplitMnist(**other, strength="tuned")).penalty > 0  # the rest is the package's
    assert tuning.best("split-mnist", "penalty", nothing="of the kind") is None


def test_lower_may_be_better_and_ends_are_told():
    tried = [({"a": 1.0}, 5.0, 3), ({"a": 2.0}, 3.0, 3), ({"a": 3.0}, 4.0, 3), ({"a": 4.0}, 1.0, 2)]
    assert tuning.chosen(row(tried, lower=True))["values"] == {"a": 2.0}
    assert tuning.at_the_end(row(tried, lower=True)) == []
    assert tuning.chosen(row(tried))["values"] == {"a": 1.0}
    assert tuning.at_the_end(row(tried)) == ["a"]


def test_what_cannot_be_tuned_is_said(tmp_path, capsys):
    assert main(["tune", "split-mnist", "--seeds", "2", "--results", str(tmp_path)]) == 1
    assert "at least 3 seeds, got 2" in capsys.readouterr().err
    assert (
        main(["tune", "split-mnist", "--settings", "penalty", "--scenario", "class", "--results", str(tmp_path)]) == 1
    )
    assert "penalty for --scenario task domain --model mlp" in capsys.readouterr().err
    for broken in ("[{", '{"format": 1}', '[{"experiment": "split-mnist"}]'):
        (tmp_path / "tuned.json").write_text(broken)
        with results.at(tmp_path), pytest.raises(LabError, match="remove it and tune again"):
            tuning.known()
    with pytest.raises(LabError, match="nothing to tune"):
        search.tune(replace(polynomial.EXPERIMENT, grids=[]), tmp_path, tmp_path, seeds=3, workers=1)
