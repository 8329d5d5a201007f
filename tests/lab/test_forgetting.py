"""What moved and what putting it back is worth; updates that are held; resuming in the middle."""

import json
from itertools import pairwise

import pytest
import torch

import neurocoder as nc
from neurocoder_lab.cli import main
from neurocoder_lab.continual import movement
from neurocoder_lab.experiments import forgetting
from neurocoder_lab.experiments.forgetting import EXPERIMENT, Forgetting
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute, folder_of

pytestmark = pytest.mark.usefixtures("digits")


def test_with_everything_put_back_a_task_is_as_it_was_when_learned(tmp_path):
    config = Forgetting(scenario="domain", budget="smoke", epochs=10, seed=1)
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    matrix = torch.tensor(final["matrix"])
    learned, last = matrix.diagonal(-1)[:-1].mean().item(), matrix[-1, :-1].mean().item()
    assert final["put_back"]["queries+keys+programs"] == pytest.approx(learned, abs=0.01)  # the matrix is rounded
    assert final["put_back"][""] == pytest.approx(last, abs=0.01)
    assert learned != last
    rows = [json.loads(line) for line in (folder_of(EXPERIMENT, config, tmp_path) / "metrics.jsonl").open()]
    assert all(rows[0][f"moved_{what}"] == pytest.approx(0, abs=1e-5) for what in movement.MEASURES)
    assert all(rows[-1][f"moved_{what}"] > 1e-5 for what in movement.MEASURES)
    run = {"config": vars(EXPERIMENT.resolve(config)), "final": final, "seconds": 1.0,
           "curve": {name: [row[name] for row in rows] for name in rows[0]}}  # fmt: skip
    assert all("NaN" not in cell for _, _, lines in forgetting.tabulate(Runs([run])) for line in lines for cell in line)
    assert len(forgetting.draw(Runs([run]))) == 2


def test_parts_go_back_one_by_one_and_the_model_stays_as_it_is():
    torch.manual_seed(0)
    model = torch.nn.Sequential(nc.Linear(6, 5, slots=4, heads=2), torch.nn.ReLU(), nc.Linear(5, 3, slots=4, heads=2))
    then = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, now = torch.randn(7, 6), model.state_dict()
    now = {name: tensor.clone() for name, tensor in now.items()}
    with movement.as_it_was(model, then, ("programs",)):
        assert torch.equal(model[0].memory.left, then["0.memory.left"])
        assert torch.equal(model[0].controller.weight, now["0.controller.weight"])
        without_keys = model(x)
    with movement.as_it_was(model, then, ("programs", "keys", "queries")):
        whole = model(x)
    assert all(torch.equal(tensor, now[name]) for name, tensor in model.state_dict().items())
    model.load_state_dict(then)
    assert torch.allclose(model(x), whole)
    assert not torch.allclose(whole, without_keys)  # slots are back, keys are not


@pytest.mark.parametrize("variant", forgetting.HOLDS)
def test_what_is_held_stays(tmp_path, variant):
    torch.manual_seed(0)
    learner = forgetting.start(EXPERIMENT.resolve(Forgetting(budget="smoke", variant=variant)))
    learner.used = {name: torch.ones(50) for name in movement.layers(learner.model)}
    states = []
    for _ in range(2):
        states.append({name: tensor.clone() for name, tensor in learner.model.state_dict().items()})
        x, y = learner.stream.train[1]
        torch.nn.functional.cross_entropy(learner.model(x, 1), y).backward()
        learner.update(1)
    states.append(learner.model.state_dict())
    hold = forgetting.HOLDS[variant]
    for before, after in pairwise(states):
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert (before["heads.1.bias"] != after["heads.1.bias"]).all()  # no part of a memory: nothing holds it
        assert any(map(movement.addresses, moved)) == (hold.later > 0)
        rows = (before["body.0.memory.left"] != after["body.0.memory.left"]).any(1)
        assert not rows.any() if hold.protected else (rows.any() and rows.all() != hold.read)
    assert torch.isfinite(learner.model(learner.stream.test[0][0], 0)).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variant", "mlp", "--sharpness", "3"], "mlp has no sharpness"),
        (["--sharpness", "0"], "sharpness must be positive"),
        (["--method", "adam", "--penalty", "5"], "adam has no penalty"),
    ],
)
def test_settings_that_do_nothing_are_refused(words, said, tmp_path, capsys):
    assert main(["run", "forgetting", "--runs", str(tmp_path), *words]) == 1
    assert said in capsys.readouterr().err


def test_resumed_it_remembers_its_copies(tmp_path):
    config = Forgetting(budget="smoke", variant="protected-slots", scenario="domain", method="oewc")
    learner = forgetting.start(EXPERIMENT.resolve(config))
    learner.copies = {0: {"a": torch.ones(2)}, 2: {"b.c": torch.zeros(3)}}
    learner.used = {"body.0": torch.rand(50)}
    again = forgetting.start(EXPERIMENT.resolve(config))
    again.load_state(learner.state())
    assert [*again.copies] == [0, 2]
    assert torch.equal(again.copies[2]["b.c"], torch.zeros(3))
    assert torch.equal(again.used["body.0"], learner.used["body.0"])
