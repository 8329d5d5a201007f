"""Large memories: variants of equal size, rows that stay, what is read in common, and resuming in the middle."""

import json
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import neurocoder as nc
from neurocoder_lab import slots, tuning
from neurocoder_lab.cli import main
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments import large_memory
from neurocoder_lab.experiments.large_memory import EXPERIMENT, VARIANTS, LargeMemory
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute, folder_of

pytestmark = pytest.mark.usefixtures("digits")


@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_networks_have_as_many_parameters_as_the_sparse_one(scenario):
    with torch.device("meta"):
        sizes = {v: sum(p.numel() for p in large_memory.build(v, scenario, 1024).parameters()) for v in VARIANTS}
    alike = ("sparse", "top-2", "top-4", "ordinary", "heads-64", "heads-1024", "key-8", "mlp")
    assert all(abs(sizes[variant] / sizes["sparse"] - 1) < 0.02 for variant in alike)
    assert all(abs(sizes[v] / sizes["sparse"] - 1) < 0.1 for v in ("moe", "peer"))  # a whole number, a square
    assert sizes["slots-256"] < sizes["slots-4096"] < sizes["sparse"]


@pytest.mark.parametrize(
    "variant", ["sparse", "learned", "ordinary", "residual", "two-hidden", "linear", "moe", "peer"]
)
def test_a_run_ends_with_what_it_measures(variant, tmp_path):
    config = LargeMemory(variant=variant, budget="smoke", epochs=1)
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert {*EXPERIMENT.metrics} <= final.keys()
    if variant in ("linear", "moe", "peer"):
        assert "shared_reads" not in final
        return
    shared = torch.tensor(final["shared_reads"])
    assert shared.shape == (5, 5)
    assert torch.allclose(shared.diagonal(), torch.ones(5), atol=1e-3)
    assert torch.equal(shared, shared.t())
    assert len(final["overwritten"]) == 4


def test_the_gates_of_experts_learn(tmp_path):
    config = EXPERIMENT.resolve(LargeMemory(variant="moe", budget="smoke", epochs=1))
    learner = large_memory.start(config)
    learner.attach(Accelerator(cpu=True))
    layers = [module for module in learner.model.modules() if isinstance(module, nc.peers.MixtureOfExperts)]
    assert len(layers) == 2
    assert not any(layer.gate.abs().sum() for layer in layers)
    for index in range(2):
        learner.step(index)
    assert all(layer.gate.abs().sum() for layer in layers)


def test_a_run_that_was_stopped_ends_as_it_would_have(tmp_path):
    config = LargeMemory(variant="slots-256", method="oewc", budget="smoke", epochs=2, penalty=10.0)
    whole = execute(EXPERIMENT, config, tmp_path / "whole", quiet=True)["final"]

    class Stop(Exception):
        pass

    class Stopping(large_memory.Reader):
        def step(self, index):
            if index == 7:
                raise Stop
            return super().step(index)

    folder = folder_of(EXPERIMENT, config, tmp_path / "parts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_memory, "Reader", Stopping)
        with pytest.raises(Stop):
            execute(EXPERIMENT, config, tmp_path / "parts", quiet=True)
    parts = execute(EXPERIMENT, config, tmp_path / "parts", quiet=True)["final"]
    assert parts == whole
    assert folder.is_dir()


@pytest.mark.parametrize("variant", ["sparse", "shared-first", "two-hidden", "mlp"])
def test_each_task_has_outputs_of_its_own(variant):
    network = large_memory.build(variant, "task", 1024)
    assert network(torch.randn(3, 1024), 4).shape == (3, 2)


def test_programs_begin_at_zero_unless_said():
    x = torch.randn(3, 1024)
    for variant, changes in (("sparse", False), ("random-start", True)):
        network = large_memory.build(variant, "domain", 1024)
        assert (network(x).std(0) > 0).all() == changes


def test_all_classes_at_once_are_one_task(tmp_path):
    final = execute(EXPERIMENT, LargeMemory(scenario="joint", budget="smoke"), tmp_path, quiet=True)["final"]
    assert len(final["matrix"]) == 2
    with pytest.raises(LabError, match="nothing is forgotten"):
        LargeMemory(scenario="joint", method="si")
    with pytest.raises(LabError, match="moe learns by adam alone: penalties are chosen for memories and mlp"):
        LargeMemory(variant="moe", method="si")
    with pytest.raises(LabError, match="adam has no penalty"):
        LargeMemory(penalty=1.0)


def test_tables_and_pictures(tmp_path, monkeypatch):
    runs = []
    for variant, scenario in (("sparse", "domain"), ("sparse", "joint"), ("mlp", "domain"), ("mlp", "joint")):
        config = LargeMemory(variant=variant, scenario=scenario, budget="smoke", epochs=1)
        final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
        rows = [json.loads(line) for line in (folder_of(EXPERIMENT, config, tmp_path) / "metrics.jsonl").open()]
        runs.append({"config": vars(EXPERIMENT.resolve(config)), "final": final, "seconds": 1.0,
                     "curve": {name: [row[name] for row in rows] for name in rows[0]}})  # fmt: skip
    tried = [{"values": {"variant": variant}, "n": 3, "mean": 70.0, "std": 1.0} for variant in ("sparse", "top-2")]
    row = {"experiment": "large-memory", "place": {"dataset": "mnist"}, "lower": False, "tried": tried}
    for module in (large_memory, tuning):
        monkeypatch.setattr(module, "known", lambda: [row])
    (_, header, rows), (_, _, held_out) = large_memory.tabulate(Runs(runs))
    assert header == ["variant", "what it is", "trained parameters", "domain, Adam", "joint, Adam"]
    assert [line[0] for line in rows] == ["sparse", "mlp"]
    assert [line[::2] for line in held_out] == [["sparse", "70 ± 1 (3)"], ["top-2", "70 ± 1 (3)"]]
    assert len(large_memory.draw(Runs(runs))) == 2


def test_bench_slots_prints_ratios(capsys, monkeypatch):
    monkeypatch.setattr(slots, "WIDTH", 16)
    assert main(["bench", "slots", "--slots", "30", "100", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "100 slots, step" in printed
    assert "product keys" in printed
    assert "PEER" in printed
    assert main(["bench", "slots", "--slots", "2"]) == 1


def test_rows_that_no_task_reads_stay_where_they_were():
    task: Any = EXPERIMENT.start(EXPERIMENT.resolve(LargeMemory(budget="smoke")))
    (rows,) = task.model
    before = rows.layer.memory.right.detach().clone()
    x, y = task.stream.train[0]  # the rows that each image reads
    torch.nn.functional.cross_entropy(task.model(x), y).backward()
    task.optimiser.step()
    read = torch.zeros(rows.layer.slots, dtype=torch.bool)
    read[x.flatten().long()] = True
    assert torch.equal((rows.layer.memory.right != before).any(1), read)


@pytest.mark.parametrize("scenario", ["domain", "task"])
def test_rows_that_were_looked_up_once_are_those_that_are_searched(scenario):
    network, x, task = large_memory.build("sparse", scenario, 1024), torch.randn(9, 1024), (3,) * (scenario == "task")
    rows = next(module for module in network.modules() if isinstance(module, large_memory.Rows))
    torch.nn.init.normal_(rows.layer.memory.right)
    assert torch.equal(network(rows.look(x), *task), network(x, *task))
    assert not torch.equal(network(rows.look(x.flip(0)), *task), network(x, *task))


def test_images_are_looked_up_only_where_nothing_before_the_rows_learns():
    looked_up = {}
    for variant in ("sparse", "heads-64", "residual", "shared-first", "learned", "top-2", "two-hidden", "mlp"):
        task: Any = EXPERIMENT.start(EXPERIMENT.resolve(LargeMemory(variant=variant, budget="smoke")))
        looked_up[variant] = not task.stream.test[0][0].is_floating_point()
    assert [variant for variant, found in looked_up.items() if found] == ["sparse", "heads-64"]
