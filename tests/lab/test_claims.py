"""Claims: every one has a rule, and the rules decide made-up results as they should."""

import json

import pytest

from neurocoder_lab import claims, results
from neurocoder_lab.cli import main

VERDICTS = {"holds", "contradicted", "inconclusive", "budget-too-short", "not-run"}


def made_up(folder, errors, budget="desk", setting="plain", variance=1.0, **final):
    """A results file whose runs of each model have the given test errors."""
    runs = []
    for model, values in errors.items():
        for seed, value in enumerate(values):
            config = {"seed": seed, "budget": budget, "model": model, "setting": setting}
            numbers = {"test": value, "target_variance": variance, **final}
            curve = {"step": [1000, 2000, 3000], "validation": [0.5, 0.3, 0.29]}
            runs.append({"config": config, "final": numbers, "curve": curve, "seconds": 1.0, "environment": {}})
    (folder / "polynomial.json").write_text(json.dumps({"format": 1, "experiment": "polynomial", "runs": runs}))
    return {claim.id: claim for claim in claims.judge(folder)}


RIVALS = {"linear": [0.3, 0.31, 0.29], "hypernet": [0.3, 0.32, 0.31], "film": [0.31, 0.3, 0.3]}
BETTER = {"neurocoder-single": [0.1, 0.11, 0.1], "neurocoder-multi": [0.1, 0.09, 0.1]}


def test_every_claim_has_a_rule_and_every_rule_a_claim():
    assert [claim["id"] for claim in claims.published()] == [*dict.fromkeys(c["id"] for c in claims.published())]
    assert {claim["id"] for claim in claims.published()} == claims.rules().keys()
    assert len(claims.rules()) == 56


@pytest.mark.parametrize(
    ("errors", "more", "verdict"),
    [
        (RIVALS | BETTER, {}, "holds"),
        (RIVALS | {model: [0.45, 0.451, 0.45] for model in BETTER}, {"variance": 0.3}, "budget-too-short"),
        (RIVALS | {model: [0.45, 0.46, 0.45] for model in BETTER}, {}, "contradicted"),
        (RIVALS | {model: [0.1, 0.5, 0.3] for model in BETTER}, {}, "inconclusive"),
        (RIVALS | {model: values[:2] for model, values in BETTER.items()}, {}, "inconclusive"),
        (RIVALS | BETTER, {"budget": "smoke"}, "budget-too-short"),
        (RIVALS | BETTER, {"variance": 0.05}, "budget-too-short"),
        ({"linear": [0.3] * 3}, {}, "not-run"),
        (RIVALS | BETTER, {"setting": "noise"}, "not-run"),
    ],
)
def test_verdicts(tmp_path, errors, more, verdict):
    judged = made_up(tmp_path, errors, **more)["nc-poly-plain"]
    assert judged.verdict == verdict
    if verdict == "holds":
        assert "neurocoder-single 0.1033 ± 0.0058 (3), best 0.1" in judged.ours
        assert (judged.n, judged.budget) == (3, "desk")


def test_a_correction_for_many_comparisons():
    assert claims.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert claims.holm([0.5]) == [0.5]
    assert claims.holm([]) == []


def test_convergence_and_boundaries(tmp_path):
    found = made_up(tmp_path, RIVALS | BETTER, boundary_ratio=2.0)
    assert found["nc-poly-speed"].verdict == "budget-too-short"
    assert found["nc-poly-boundaries"].n == 3
    assert "multi-step 2 ± 0 (3), single-step 2 ± 0 (3)" in found["nc-poly-boundaries"].ours


def test_a_few_runs_of_a_longer_budget_do_not_hide_the_others(tmp_path):
    made_up(tmp_path, RIVALS | BETTER)
    file = tmp_path / "polynomial.json"
    content = json.loads(file.read_text())
    longer = content["runs"][0] | {"config": content["runs"][0]["config"] | {"budget": "paper"}}
    file.write_text(json.dumps(content | {"runs": [*content["runs"], longer]}))
    judged = {claim.id: claim for claim in claims.judge(tmp_path)}["nc-poly-plain"]
    assert (judged.verdict, judged.budget) == ("holds", "desk")


def test_the_command_prints_every_claim(tmp_path, capsys):
    made_up(tmp_path, RIVALS | BETTER)
    assert main(["claims", "--results", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed) == 56
    assert all({"id", "verdict", "ours", "paper", "n", "budget"} <= claim.keys() for claim in printed)
    assert {claim["verdict"] for claim in printed} <= VERDICTS
    assert main(["claims", "--results", str(tmp_path)]) == 0
    assert "1 holds" in capsys.readouterr().out


def test_results_of_another_version_are_refused(tmp_path, capsys):
    (tmp_path / "polynomial.json").write_text('{"format": 7}')
    assert main(["claims", "--results", str(tmp_path)]) == 1
    assert "another version" in capsys.readouterr().err
    with pytest.raises(results.LabError):
        results.load(tmp_path, "polynomial")
