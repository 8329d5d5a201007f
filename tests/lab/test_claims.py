"""Claims: every one has a rule, and the rules decide made-up results as they should."""

import json

import pytest

from neurocoder_lab import claims, papers, results
from neurocoder_lab.cli import main
from neurocoder_lab.rules import rules

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
    assert [claim["id"] for claim in papers.published()] == [*dict.fromkeys(c["id"] for c in papers.published())]
    assert {claim["id"] for claim in papers.published()} == rules().keys()
    assert len(rules()) == 60


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


def test_holm_corrects_between_claims_and_not_inside_of_one(tmp_path):
    """Six comparisons of one claim, each at p just below 5%: the claim's p is the largest, not six times as large."""
    noisy = {"linear": [0.300, 0.310, 0.320], "neurocoder-single": [0.285, 0.290, 0.295]}
    runs = {model: noisy["neurocoder-single" if "neurocoder" in model else "linear"] for model in (*RIVALS, *BETTER)}
    judged = made_up(tmp_path, runs)["nc-poly-plain"]
    (largest,) = {
        round(test.p_values(results.load(tmp_path, "polynomial"))[0], 9) for test in rules()["nc-poly-plain"].tests
    }
    assert 0.02 < largest < 0.05
    # the table has one more claim that these runs decide: multi-step below single-step
    assert judged.p == pytest.approx(2 * largest, rel=1e-6)
    assert judged.p_opposite == 1


def test_convergence_is_judged_at_the_papers_length_by_both_models(tmp_path):
    def judged(budget, runs, steps):
        made_up(tmp_path, runs, budget=budget, steps=steps)
        return {claim.id: claim for claim in claims.judge(tmp_path)}["nc-poly-speed"]

    assert judged("desk", RIVALS | BETTER, 3000).verdict == "budget-too-short"
    assert judged("paper", RIVALS | BETTER, 10_000).verdict == "contradicted"  # the plain head converges at 1,000 too
    few = BETTER | {"linear": [0.3, 0.31]}
    assert (judged("paper", few, 10_000).verdict, judged("paper", few, 10_000).n) == ("inconclusive", 2)


def test_boundaries_need_a_single_step_that_hardly_moves(tmp_path):
    def judged(multi, single):
        made_up(tmp_path, RIVALS | BETTER)
        file = tmp_path / "polynomial.json"
        content = json.loads(file.read_text())
        for run in content["runs"]:
            values = {"neurocoder-multi": multi, "neurocoder-single": single}.get(run["config"]["model"])
            if values:
                run["final"]["boundary_ratio"] = values[run["config"]["seed"]]
        file.write_text(json.dumps(content))
        return {claim.id: claim for claim in claims.judge(tmp_path)}["nc-poly-boundaries"]

    claim = judged([3.0, 3.1, 2.9], [1.0, 1.1, 1.05])
    assert claim.verdict == "holds"
    assert "single-step's mean 1.05" in claim.ours
    assert judged([3.0, 3.1, 2.9], [1.3, 1.4, 1.35]).verdict == "inconclusive"
    assert judged([0.5, 0.6, 0.55], [1.3, 1.4, 1.35]).verdict == "contradicted"


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
    assert len(printed) == 60
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


def test_a_folder_without_results_is_said(tmp_path, capsys):
    assert main(["claims", "--results", str(tmp_path)]) == 1
    assert "holds no results" in capsys.readouterr().err
