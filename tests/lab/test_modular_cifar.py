"""The experiment modular-cifar: sizes of its networks, clusters of paths, small runs, and what is shown of them."""

from itertools import product

import pytest
import torch
from accelerate import Accelerator

import neurocoder as nc
from neurocoder.modular.route import Given, routed
from neurocoder.modular.training import classification
from neurocoder_lab.experiments import modular_cifar
from neurocoder_lab.experiments.modular_cifar import EXPERIMENT, MODELS, ModularCifar
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute
from tests.lab import pictures
from tests.lab.small import distilled, same_when_stopped


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("train", 400), ("test", 100)):
        pictures.write(folder, "cifar10", split, count, size=32)
    return {"NEUROCODER_DATA": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture(autouse=True)
def _here(places, monkeypatch):
    for name, value in places.items():
        monkeypatch.setenv(name, value)


def size(network):
    return sum(p.numel() for p in network.parameters())


def test_the_baseline_has_the_parameters_of_two_modules():
    plain = size(modular_cifar.build("baseline"))
    assert plain == 27 * 2 + 2 + 2 * (18 * 2 + 2) + 32 * 48 + 48 + 48 * 10 + 10
    for model in ("linear", "convolution"):
        network = modular_cifar.build(model).eval()
        pools = sum(size(layer.pool) for layer in network if hasattr(layer, "pool"))
        assert pools == 5 * plain  # ten modules, of which two are used
        assert network(torch.zeros(3, 3, 32, 32)).shape == (3, 10)
        assert network[0].pool[0].out_channels == 1
    assert size(modular_cifar.build("convolution")) < size(modular_cifar.build("linear"))


def test_the_network_of_figure_2_has_six_modular_layers():
    with nc.trace(network := modular_cifar.build("paths")) as seen:
        network.eval()(torch.zeros(2, 3, 32, 32))
    assert [seen[name].probability.shape for name in seen] == [(2, 1, 3)] * 6


def test_clusters_are_those_who_end_alike():
    end = torch.tensor([[0, 1, 2]] * 3 + [[2, 2, 2]] * 2 + [[0, 0, 0]])
    start = torch.tensor([[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 2], [0, 2, 2], [1, 0, 1]])
    found = modular_cifar.clusters({0: start, 9: end}, 3)
    assert [(cluster["images"], cluster["path"]) for cluster in found] == [
        (3, [1, 2, 3]),
        (2, [3, 3, 3]),
        (1, [1, 1, 1]),
    ]
    stages = found[0]["stages"]
    assert stages["9"]["nodes"] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert stages["9"]["edges"][0] == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert stages["0"]["nodes"][0] == [0.333] * 3
    assert found[1]["stages"]["0"]["edges"][0] == [[0, 0, 0.5], [0, 0, 0], [0, 0, 0.5]]


def test_smoke_runs_and_what_is_shown_of_them(tmp_path):
    runs = Runs()
    for model in MODELS:
        runs.append(distilled(EXPERIMENT, ModularCifar(budget="smoke", model=model), tmp_path))
        final = runs[-1]["final"]
        assert final["gap"] == pytest.approx(final["train"] - final["test"])
        assert ("h_b" in final) == ("log_likelihood_likely" in final) == (model != "baseline")
    assert {run["final"]["steps"] for run in runs} == {4}
    tables = modular_cifar.tabulate(runs)
    assert [len(rows) for _, _, rows in tables] == [3, 3, 1]
    assert tables[0][0].startswith("CIFAR-10, 2 epochs of 256 images")
    drawn = modular_cifar.draw(runs)
    assert [title[:5] for title, _ in drawn] == ["Fig 6", "Gradi", "Fig 2"]
    assert all(picture.startswith("<svg") for _, picture in drawn)


def test_the_likelihood_is_that_of_labels_and_stored_modules():
    """Of all images what EM minimises, and no more than log p(y | x): the sum over the 3^6 compositions of Fig 2's."""
    torch.manual_seed(0)
    task = modular_cifar.Pictures(EXPERIMENT.resolve(ModularCifar(budget="smoke", model="paths", examples=20)))
    task.attach(Accelerator(cpu=True))
    for index in range(4):
        task.step(index)
    task.network.eval()
    with torch.no_grad():
        measured = task.evaluate()
        loss = task.lesson.training.loss(*task._batch(torch.arange(20))).item()
        assert measured["log_likelihood"] == pytest.approx(-loss, rel=1e-5)
        assert measured["log_likelihood"] != pytest.approx(measured["log_likelihood_likely"])
        x, y, _ = task._batch(torch.arange(20))
        joint = []
        for path in product(range(3), repeat=6):
            with routed(task.model, Given(torch.tensor([path] * 20))) as route:
                joint.append(classification(task.model(x), y) + route.log_prob)
        assert measured["log_likelihood"] < torch.stack(joint).logsumexp(0).mean().item()


@pytest.mark.parametrize(("model", "epochs"), [("baseline", 25), ("linear-5-steps", 60)])
def test_it_learns(tmp_path, model, epochs):
    config = ModularCifar(model=model, epochs=epochs, examples=360, measure="validation", rate=0.01)
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert final["train"] > 25  # chance: 10
    assert "test" not in final
    assert final["gap"] == pytest.approx(final["train"] - final["validation"])


def test_stopped_and_resumed_it_is_the_same_run(tmp_path, monkeypatch):
    config = ModularCifar(budget="smoke", model="paths", epochs=6)
    final = same_when_stopped(EXPERIMENT, config, tmp_path, monkeypatch, at=7)
    assert [*final["clusters"][0]["stages"]] == ["1", "2", "6", "12"]


def test_all_take_the_rate_of_the_baseline(monkeypatch):
    monkeypatch.setattr(modular_cifar, "best", lambda *names, model: {"baseline": 0.002}.get(model))
    assert {EXPERIMENT.resolve(ModularCifar(model=model)).rate for model in MODELS} == {0.002}
