"""The experiment mnist-linear: sizes, what a look at attention tells, refusals, and a small run of every model."""

import json

import pytest
import torch

from neurocoder_lab import attention
from neurocoder_lab.cli import main
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments import mnist_linear
from neurocoder_lab.experiments.mnist_linear import EXPERIMENT, STEPS, MnistLinear
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute, folder_of
from neurocoder_lab.sweep import grid

pytestmark = pytest.mark.usefixtures("digits")


def test_no_neurocoder_is_larger_than_the_linear_classifier():
    def size(model, steps):
        return sum(p.numel() for p in mnist_linear.build(model, steps).parameters())

    assert size("linear", 0) == 7850
    for model in ("neurocoder", "neurocoder-reading"):
        assert all(size(model, steps) <= 7800 for steps in STEPS[model])
    assert size("neurocoder", 10) == size("neurocoder", 2)


def test_the_projection_is_the_same_in_every_run_and_with_one_step_the_controller_stays_recurrent():
    torch.manual_seed(1)
    first = mnist_linear.build("neurocoder", 1)
    torch.manual_seed(2)
    second = mnist_linear.build("neurocoder", 5)
    assert torch.equal(first[1].weight, second[1].weight)
    assert not any(p is first[1].weight for p in first.parameters())
    assert type(first[2].controller) is type(second[2].controller)


def test_one_hundredth_of_the_inputs_makes_a_pattern():
    attention_NRP = torch.eye(4)[torch.tensor([0] * 97 + [1] * 2 + [2])].unsqueeze(1).repeat(1, 3, 1)
    seen = attention.patterns(attention_NRP)
    assert (seen["patterns"], seen["pattern_coverage"], seen["patterns_distinct"]) == (3, pytest.approx(1), 3)
    seen = attention.patterns(attention_NRP.repeat(2, 1, 1)[:-1])
    assert (seen["patterns"], seen["pattern_coverage"], seen["patterns_distinct"]) == (2, pytest.approx(198 / 199), 3)


def test_the_most_diverse_attention_has_no_common_pattern_but_that_is_told():
    places_NR = torch.cartesian_prod(*[torch.arange(6)] * 3)
    seen = attention.patterns(torch.nn.functional.one_hot(places_NR, 6).float())
    assert (seen["patterns"], seen["pattern_coverage"], seen["patterns_distinct"]) == (0, 0, 216)
    assert seen["patterns_effective"] == pytest.approx(216)


def test_leaves_that_are_the_classes_tell_all_and_shuffled_ones_nothing():
    """Eight classes, three components that each look at one of two slots: the bits of the class."""
    label_N = torch.arange(8).repeat(100)
    bits_NR = label_N[:, None] // torch.tensor([4, 2, 1]) % 2
    generator = torch.Generator().manual_seed(0)
    noise = 0.05 * torch.rand(800, 3, 2, generator=generator)
    seen = attention.look(torch.nn.functional.one_hot(bits_NR, 2) + noise, label_N)
    assert seen["tree_separation"] == pytest.approx(1.0)
    assert seen["tree_purity"] == 1.0
    assert seen["tree_separation_shuffled"] < 0.1
    assert seen["patterns"] == 8
    assert sorted(map(sum, seen["leaves"])) == [100] * 8
    same = attention.look(torch.ones(800, 3, 2), label_N)  # nothing to choose: one leaf
    assert same["tree_separation"] == 0.0
    assert sum(map(bool, map(sum, same["leaves"]))) == 1


def test_two_means_finds_two_groups_and_calls_the_larger_the_first():
    x_NP = torch.tensor([[0.0, 1.0]] * 3 + [[1.0, 0.0]] * 5)
    side_N, centre_2P = attention.two_means(x_NP)
    assert side_N.tolist() == [1] * 3 + [0] * 5
    torch.testing.assert_close(centre_2P, torch.tensor([[1.0, 0.0], [0.0, 1.0]]))


def test_a_smoke_run_of_every_model_and_its_pictures(tmp_path):
    runs = Runs()
    settings = [{"model": model} for model in mnist_linear.MODELS] + [{"attention_steps": steps} for steps in (1, 10)]
    for setting in [*settings, {"optimiser": "sgd"}]:
        config = EXPERIMENT.resolve(MnistLinear(budget="smoke", epochs=1, **setting))
        final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
        assert 0 <= final["test_error"] <= 100
        runs.append({"config": vars(config), "final": json.loads(json.dumps(final)), "curve": {}})
    assert {"tree_separation", "patterns"} <= runs.where(model="single-30-slots")[0]["final"].keys()
    errors, seen = mnist_linear.tabulate(runs)
    assert len(errors[2]) == len(runs)
    assert len(seen[2]) == 2
    drawn = mnist_linear.draw(runs)
    assert [title[:6] for title, _ in drawn] == ["Fig 4a", "Fig 4b", "Fig 4c", "Fig 4d"]
    assert all(picture.startswith("<svg") for _, picture in drawn)


def test_it_learns(tmp_path):
    config = MnistLinear(budget="smoke", attention_steps=1, epochs=40, measure="validation")
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert final["validation_error"] < 50  # chance: 90
    assert "test_error" not in final
    assert folder_of(EXPERIMENT, config, tmp_path).is_dir()  # named alike before and after it is filled in


def test_a_sweep_leaves_out_what_does_not_go_together():
    found = grid(EXPERIMENT, EXPERIMENT.axes | EXPERIMENT.main, 1)
    assert len(found) == 1 + 10 + 3 + 1 + 1
    with pytest.raises(LabError, match="linear has 0 attention steps, got 3"):
        grid(EXPERIMENT, {"model": ("linear",), "attention_steps": (3,)}, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--attention-steps", "11"], "neurocoder has 1 to 10 attention steps, got 11"),
        (["--model", "neurocoder-reading", "--attention-steps", "3"], "neurocoder-reading has 1 or 5 or 10 attention"),
        (["--model", "single-30-slots", "--attention-steps", "2"], "single-30-slots has 1 attention steps, got 2"),
        (["--rate", "0"], "rate must be a positive number"),
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--examples", "-3"], "examples must be at least 1"),
    ],
)
def test_wrong_use_is_told(tmp_path, capsys, words, said):
    assert main(["run", "mnist-linear", *words, "--runs", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
