"""Rules name only what their experiments have, and judge their claim: every kind of test, on made-up runs."""

import json
from dataclasses import fields, replace

import pytest

from neurocoder_lab import claims, experiments, results, tuning
from neurocoder_lab.evidence import Bound, Compare, Falls, Group, unknown, welch
from neurocoder_lab.results import Runs
from neurocoder_lab.rules import COUNTED, rules

EXISTING = {*experiments.NAMES, *COUNTED}
NOT_JUDGED = {"forgetting"}  # ours, and no claim of a paper


def test_every_rule_is_of_an_experiment_and_every_experiment_has_one():
    assert {rule.experiment for rule in rules().values()} == EXISTING - NOT_JUDGED


@pytest.mark.parametrize("name", [name for name, rule in rules().items() if rule.experiment in experiments.NAMES])
def test_what_a_rule_names_exists(name):
    rule = rules()[name]
    experiment = experiments.get(rule.experiment)
    assert rule.largest in ("", *(field.name for field in fields(experiment.config)))
    named = [*rule.groups(), *rule.beside] + (rule.instead.groups() if rule.instead else [])
    assert [unknown(group, experiment) for group in named] == [None] * len(named)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"where": {"modle": "linear"}}, "no setting 'modle'"),
        ({"where": {"model": "liner"}}, "no run of polynomial is liner"),
        ({"where": {"model": "linear", "setting": "plane"}}, "no run of polynomial is linear plane"),
        ({"metric": "tset"}, "measures no 'tset'"),
    ],
)
def test_a_misspelt_axis_value_or_metric_is_found(change, said):
    group = Group({"model": "linear", "setting": "plain"}, "test")
    assert unknown(group, experiments.get("polynomial")) is None
    assert said in unknown(replace(group, **change), experiments.get("polynomial"))


def test_counted_results_have_what_their_rules_name():
    for rule in rules().values():
        if rule.experiment in COUNTED:
            assert {group.metric for group in rule.groups()} <= {*COUNTED[rule.experiment]}


def run(where, seed, budget="desk", **final):
    config = {"seed": seed, "budget": budget} | where
    return {"config": config, "final": final, "curve": {}, "seconds": 1.0, "environment": {}}


def verdict(name, *runs):
    """What a rule makes of runs, alone in its table."""
    rule, chosen = claims._chosen(rules()[name], Runs(runs))
    p_values = claims._corrected({name: rule}, {name: chosen}).get(name, (None, None))
    return claims._verdict(rule, chosen, *p_values)


def several(where, seeds=5, budget="desk", **numbers):
    """Runs whose metrics lie around the given numbers."""
    return [
        run(where, seed, budget, **{name: value * (1 + 0.001 * (seed % 5)) for name, value in numbers.items()})
        for seed in range(seeds)
    ]


def test_large_memories_are_compared_at_equal_size_over_ten_seeds():
    place = {"scenario": "domain", "method": "adam", "dataset": "mnist"}
    others = [
        one
        for variant in ("linear", "features", "winners", "mlp", "moe", "peer")
        for one in several({"variant": variant} | place, seeds=10, accuracy=55.0, parameters=250_000)
    ]
    for accuracy, size, seeds, wanted in (
        (80.0, 262_000, 10, "holds"),
        (80.0, 262_000, 9, "inconclusive"),
        (80.0, 300_000, 10, "inconclusive"),
        (50.0, 262_000, 10, "contradicted"),
    ):
        mine = several({"variant": "sparse"} | place, seeds=seeds, accuracy=accuracy, parameters=size)
        assert verdict("ours-large-memory-kept", *mine, *others) == wanted
    mine = several({"variant": "sparse"} | place, seeds=10, accuracy=72.0)
    assert verdict("ours-large-memory-paper", *mine) == "contradicted"
    for learned, wanted in ((96.0, "holds"), (94.0, "contradicted")):
        balanced = {"variant": "balanced-512"} | place
        whole = several(balanced | {"scenario": "joint"}, seeds=10, accuracy=learned)
        assert verdict("ours-large-memory-trade", *several(balanced, seeds=10, accuracy=72.0), *whole) == wanted
    better = [
        one
        for method in ("oewc", "si")
        for one in several({"variant": "sparse"} | place | {"method": method}, seeds=10, accuracy=75.0)
    ]
    assert verdict("ours-large-memory-methods", *mine, *better) == "holds"


def test_size_and_error_on_mnist():
    linear = several({"model": "linear", "optimiser": "adam"}, test_error=8.0, parameters=7850)
    for error, size, wanted in ((6.5, 7000, "holds"), (6.5, 9000, "contradicted"), (9.0, 7000, "contradicted")):
        place = {"model": "neurocoder", "optimiser": "adam", "attention_steps": 5}
        ours = several(place, test_error=error, parameters=size)
        assert verdict("nc-mnist-error", *linear, *ours) == wanted


def test_error_against_steps_is_a_rank_correlation():
    def by_steps(slope):
        return [
            run(
                {"model": "neurocoder", "optimiser": "adam", "attention_steps": steps},
                seed,
                test_error=7 + slope * steps + 0.01 * (seed % 2),
            )
            for steps in range(1, 11)
            for seed in range(3)
        ]

    assert verdict("nc-mnist-steps", *by_steps(-0.1)) == "holds"
    assert verdict("nc-mnist-steps", *by_steps(0.1)) == "contradicted"
    assert verdict("nc-mnist-steps", *by_steps(0.0)) == "inconclusive"
    one_seed = [run for run in by_steps(-0.1) if run["config"]["seed"] == 0]
    assert verdict("nc-mnist-steps", *one_seed) == "inconclusive"  # three runs at each place are wanted


def test_patterns_are_compared_where_they_cover_half_of_the_images():
    def attention(several_, single):
        places = [{"model": model, "optimiser": "adam"} for model in ("multi-10-slots", "single-30-slots")]
        return [
            r
            for place, (count, coverage) in zip(places, (several_, single), strict=True)
            for r in several(place, patterns=count, pattern_coverage=coverage)
        ]

    assert verdict("nc-mnist-patterns", *attention((20, 0.8), (5, 0.9))) == "holds"
    assert verdict("nc-mnist-patterns", *attention((5, 0.9), (20, 0.8))) == "contradicted"
    assert verdict("nc-mnist-patterns", *attention((20, 0.8), (0, 0.0))) == "inconclusive"
    assert verdict("nc-mnist-patterns", *attention((0, 0.0), (20, 0.8))) == "inconclusive"


def test_a_rule_says_chosen_only_of_what_was(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "files", lambda package: tmp_path / "nothing")

    def words(name):
        with results.at(tmp_path):
            return rules()[name].how()

    def row(place, lower=True, **values):
        tried = [{"values": values, "mean": 1.0, "n": 3}]
        return {"experiment": "mnist-linear", "place": place, "lower": lower, "tried": tried}

    assert "not yet chosen" in words("nc-mnist-error")
    assert "not yet chosen" in words("nc-mnist-steps")
    tuned = [row({"model": model}, optimiser="sgd") for model in ("linear", "neurocoder")]
    tuned += [row({"model": "neurocoder", "optimiser": "sgd"}, attention_steps=10)]
    place = {"model": "neurocoder", "optimiser": "adam"}
    tuned += [row(place | {"attention_steps": steps}, rate=0.01) for steps in range(1, 11)]
    (tmp_path / "tuned.json").write_text(json.dumps(tuned))
    assert "J and optimiser as chosen" in words("nc-mnist-error")
    assert "neurocoder sgd attention_steps 10" in words("nc-mnist-error")
    assert "rate chosen on validation data" in words("nc-mnist-steps")


def test_a_fifth_of_the_parameters():
    def cifar(size):
        runs = []
        for network, rivals in (("mlp", ("moe", "nsm")), ("lenet", ("moe-all-dense", "nsm-all-dense"))):
            place = {"network": network, "dataset": "cifar10"}
            runs += several({"model": "neurocoder"} | place, test=55.0, parameters=size)
            runs += [r for rival in rivals for r in several({"model": rival} | place, test=52.0, parameters=1000)]
        return runs

    assert verdict("nc-cifar-size", *cifar(150)) == "holds"
    assert verdict("nc-cifar-size", *cifar(250)) == "contradicted"


def test_a_gain_about_ten_points_and_a_steady_head():
    def streams(name, ours, spread=1.0):
        place = {"dataset": "cifar10" if "10-" in name and "100" not in name else "cifar100", "method": "si"}
        mine = [run({"model": "neurocoder"} | place, s, accuracy=ours + spread * (s - 2)) for s in range(5)]
        return [*mine, *(run({"model": "plain"} | place, s, accuracy=70 + 0.5 * (s - 2)) for s in range(5))]

    assert verdict("nc-split-cifar100-si", *streams("nc-split-cifar100-si", 80)) == "holds"
    assert verdict("nc-split-cifar100-si", *streams("nc-split-cifar100-si", 74)) == "inconclusive"
    assert verdict("nc-split-cifar100-si", *streams("nc-split-cifar100-si", 60)) == "contradicted"
    assert verdict("nc-split-cifar10-si", *streams("nc-split-cifar10-si", 80, spread=0.4)) == "holds"
    assert verdict("nc-split-cifar10-si", *streams("nc-split-cifar10-si", 74, spread=0.4)) == "holds"
    assert verdict("nc-split-cifar10-si", *streams("nc-split-cifar10-si", 80)) == "inconclusive"


def test_not_better_by_a_point_needs_five_runs_that_learned_more_of_what_they_trained_on():
    def modular(test, seeds=5, train=90.0):
        return [*several({"model": "linear"}, seeds, train=train, test=test),
                *several({"model": "baseline"}, seeds, train=80.0, test=60.0)]  # fmt: skip

    assert verdict("mn-cifar-generalise", *modular(60.2)) == "holds"
    assert verdict("mn-cifar-generalise", *modular(65.0)) == "contradicted"
    assert verdict("mn-cifar-generalise", *modular(60.2, seeds=4)) == "inconclusive"
    assert verdict("mn-cifar-generalise", *modular(11.0)) == "inconclusive"  # as by chance
    for test in (50.0, 65.0):
        assert verdict("mn-cifar-generalise", *modular(test, train=70.0)) == "inconclusive"  # not what is claimed
    assert "Decided only where train of linear is above baseline" in rules()["mn-cifar-generalise"].how()


def test_a_controller_that_chooses_as_by_chance_does_not_overfit_less():
    linear = several({"model": "linear"}, gap=50.0, test=15.0)
    for test, gap, wanted in ((30.0, 20.0, "holds"), (10.0, 0.5, "inconclusive"), (30.0, 60.0, "contradicted")):
        found = verdict("mn-cifar-controller", *linear, *several({"model": "convolution"}, gap=gap, test=test))
        assert found == wanted


def test_noise_is_what_moves_during_training_unless_it_has_collapsed():
    def treebank(noise, other, h_b=2.0):
        """Entropies of EM and REINFORCE that go up and down by so much at every second evaluation."""
        runs = several({"method": "fixed", "modules": 1, "choices": 1}, test_perplexity=250.0)
        for method, size, final in (
            ("em", noise, {"h_a": 0.01, "h_b": 2.6, "e_steps": 16.0}),
            ("reinforce", other, {"h_a": 0.5, "h_b": h_b}),
        ):
            for made in several({"method": method, "modules": 15, "choices": 1}, **final):
                zigzag = {name: [final[name] + size * (n % 2) for n in range(40)] for name in ("h_a", "h_b")}
                made["curve"] = {"step": [*range(75, 3001, 75)]} | zigzag
                runs.append(made)
        return runs

    assert verdict("mn-ptb-entropy", *treebank(0.001, 0.1)) == "holds"
    assert verdict("mn-ptb-entropy", *treebank(0.1, 0.001)) == "inconclusive"
    assert verdict("mn-ptb-entropy", *treebank(0.001, 0.0, h_b=0.0)) == "holds"  # one module has no noise
    moves = next(group.of for group in rules()["mn-ptb-entropy"].groups() if group.of)
    assert moves({"curve": {"step": [1, 2, 3, 4, 5], "h_a": [9.0, 0.0, 1.0, 1.5, 1.0]}}) == 0.5
    assert moves({"curve": {"step": [5], "h_a": [1.0]}}) == 0.0


def test_runs_that_are_too_short_decide_nothing():
    rows = [("em", 5, 1), ("em", 15, 1), ("fixed", 1, 1), ("fixed", 3, 3)]

    def treebank(baseline, e_steps=16.0):
        level = {"em": 0.9 * baseline, "fixed": baseline}
        return [
            r
            for method, modules, choices in rows
            for r in several(
                {"method": method, "modules": modules, "choices": choices},
                test_perplexity=level[method],
                e_steps=e_steps,
            )
        ]

    assert verdict("mn-ptb-baseline", *treebank(250.0)) == "holds"
    assert verdict("mn-ptb-baseline", *treebank(400.0)) == "budget-too-short"
    assert verdict("mn-ptb-baseline", *treebank(250.0, e_steps=1.0)) == "budget-too-short"
    densenet, runs = {"network": "densenet", "dataset": "cifar10"}, []
    for budget, wanted in (("desk", "budget-too-short"), ("paper", "holds")):
        for epochs in (1, 5):
            for model in ("neurocoder", "original", "moe", "nsm"):
                place = {"model": model, "epochs": epochs} | densenet
                runs += several(place, budget=budget, test=95.0 if model == "neurocoder" else 93.0)
        assert verdict("nc-cifar10-densenet", *runs) == wanted
        _, chosen = claims._chosen(rules()["nc-cifar10-densenet"], Runs(runs))
        assert {(run["config"]["epochs"], run["config"]["budget"]) for run in chosen} == {(5, budget)}


def test_agents_must_beat_chance_and_have_had_their_steps():
    def game(name, scores, steps, trainer="sync"):
        return [
            r
            for model, score in scores.items()
            for r in several(
                {"model": model, "game": name, "trainer": "sync" if model == "random" else trainer},
                score=score,
                environment_steps=0 if model == "random" else steps,
            )
        ]

    scores = {"neurocoder": 300.0, "a3c": 200.0, "hypernet": 250.0, "random": 68.0}
    assert verdict("nc-atari-seaquest", *game("seaquest", scores, 33e6)) == "holds"
    assert verdict("nc-atari-seaquest", *game("seaquest", scores, 1e6)) == "budget-too-short"
    assert verdict("nc-atari-frostbite", *game("frostbite", scores, 33e6)) == "budget-too-short"
    chance = scores | {"random": 350.0}
    assert verdict("nc-atari-seaquest", *game("seaquest", chance, 33e6)) == "inconclusive"  # long enough, and nobody
    assert verdict("nc-atari-seaquest", *game("seaquest", chance, 1e6)) == "budget-too-short"
    worse = scores | {"neurocoder": 100.0}
    sync, published = game("seaquest", worse, 33e6), game("seaquest", scores, 33e6, "a3c")
    assert verdict("nc-atari-seaquest", *sync) == "contradicted"
    assert verdict("nc-atari-seaquest", *published) == "holds"
    both = [*sync, *(run for run in published if run["config"]["model"] != "random")]
    assert verdict("nc-atari-seaquest", *both) == "holds"
    some = [*sync, *(run for run in published if run["config"]["model"] in ("a3c", "neurocoder"))]
    assert verdict("nc-atari-seaquest", *some) == "contradicted"  # not all of them by the paper's trainer


def test_algorithms_are_judged_at_the_most_tasks_and_decided_at_eight():
    settings = (
        "bit_error",
        *(f"bit_error_{setting}" for setting in ("longer", "more_repeats", "more_items", "more_tasks")),
    )

    def machines(tasks, ours=5.0, ntm=10.0, models=("ntm", "nsm", "film", "hypernet", "neurocoder")):
        errors = dict.fromkeys(models, ntm) | {"neurocoder": ours}
        place = {"setting": "chain", "tasks": tasks}
        return [
            r for model in models for r in several({"model": model} | place, **dict.fromkeys(settings, errors[model]))
        ]

    for claim in ("nc-algo-train", "nc-algo-test"):
        assert verdict(claim, *machines(2)) == "budget-too-short"
        assert verdict(claim, *machines(4)) == "budget-too-short"
        assert verdict(claim, *machines(8)) == "holds"
        assert verdict(claim, *machines(8, ours=15.0)) == "contradicted"
        assert verdict(claim, *machines(8, ntm=30.0)) == "budget-too-short"
        assert verdict(claim, *machines(2, ours=30.0), *machines(8)) == "holds"
        assert verdict(claim, *machines(2), *machines(4, models=("ntm",))) == "budget-too-short"
        assert verdict(claim, *machines(2, models=("ntm", "neurocoder"))) == "not-run"

    def looked_at(*runs):
        _, chosen = claims._chosen(rules()["nc-algo-train"], Runs(runs))
        return {run["config"]["tasks"] for run in chosen}

    assert looked_at(*machines(2), *machines(4)) == {4}
    assert looked_at(*machines(2), *machines(4, models=("ntm", "nsm", "neurocoder"))) == {2}
    alone = several({"model": "ntm", "setting": "copy", "tasks": 1}, bit_error=1.0)
    assert looked_at(*alone, *machines(2)) == {2}


def test_solving_and_generalising_are_two_measurements():
    em = {"model": "em", "setting": "separate"}
    good = {"train_loss": 1e-5, "h_a": 0.01, "h_b": 0.69}
    runs = several(em, 10, **good, held_out_loss=0.5)
    assert verdict("mn-toy", *runs) == "holds"
    assert verdict("mn-toy-held-out", *runs) == "contradicted"
    assert verdict("mn-toy", *several(em, 9, **good)) == "inconclusive"
    bad = good | {"h_a": 0.5}
    for failed, wanted in ((1, "holds"), (2, "inconclusive"), (5, "contradicted")):
        runs = [run(em, seed, **(bad if seed < failed else good)) for seed in range(10)]
        assert verdict("mn-toy", *runs) == wanted


def test_without_spread_what_is_measured_is_sure():
    assert welch([2.0, 2.0], [1.0, 1.0]) == (0.0, 1.0)
    assert welch([1.0, 1.0], [1.0, 1.0]) == (1.0, 1.0)
    same = Runs(several({"model": "a"}, 1, value=1.0) * 3)
    above, below = (Bound(Group({"model": "a"}, "value", lower=lower), 0.5) for lower in (False, True))
    assert above.p_values(same) == (0.0, 1.0)
    assert below.p_values(same) == (1.0, 0.0)


def test_factors_and_margins():
    runs = Runs([*several({"model": "a"}, 5, step=1.1), *several({"model": "b"}, 5, step=1.0)])
    a, b = (Group({"model": model}, "step", lower=True) for model in "ab")
    assert Compare(a, b).p_values(runs)[0] > 0.95
    assert Compare(a, b, factor=1.15).p_values(runs)[0] < 0.05
    assert Compare(a, b, margin=0.2).p_values(runs)[0] < 0.05
    assert Compare(a, b, factor=1.15).words() == "step of a below 1.15 times b"
    assert Falls(a, "seed").p_values(Runs(runs[:2])) == (1.0, 1.0)


def test_pictures_are_judged_where_the_original_is_as_good_as_published_and_all_are_of_one_precision():
    place = {"network": "mlp", "dataset": "cifar10"}

    def mlp(original, precision="no"):
        rest = [r for model in ("moe", "nsm") for r in several({"model": model} | place, test=original)]
        mine = several({"model": "neurocoder"} | place, test=original + 3)
        for r in mine:
            r["environment"] = {"precision": precision}
        return [*several({"model": "original"} | place, test=original), *rest, *mine]

    assert verdict("nc-cifar10-mlp", *mlp(51)) == "holds"
    assert verdict("nc-cifar10-mlp", *mlp(49)) == "budget-too-short"  # the paper's original has 52.06
    assert verdict("nc-cifar10-mlp", *mlp(51, "bf16")) == "inconclusive"
    rule = rules()["nc-cifar10-mlp"]
    assert "precision bf16 and full" in claims._told(rule, Runs(mlp(51, "bf16")))
    assert "precision" not in claims._told(rule, Runs(mlp(51)))


def test_networks_of_different_precision_are_judged_side_by_side_where_no_test_mixes_them():
    def network(name, rivals, precision):
        runs = several({"network": name, "dataset": "cifar10", "model": "neurocoder"}, test=60.0, parameters=1)
        for rival in rivals:
            runs += several({"network": name, "dataset": "cifar10", "model": rival}, test=50.0, parameters=10)
        for run in runs:
            run["environment"] = {"precision": precision}
        return runs

    mlp, lenet = ("moe", "nsm"), ("moe-all-dense", "nsm-all-dense")
    assert verdict("nc-cifar-size", *network("mlp", mlp, "no"), *network("lenet", lenet, "bf16")) == "holds"
    mixed = [*network("lenet", lenet[:1], "bf16"), *network("lenet", lenet, "no")[3:]]
    assert verdict("nc-cifar-size", *network("mlp", mlp, "no"), *mixed) == "inconclusive"
