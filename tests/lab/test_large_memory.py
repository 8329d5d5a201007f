"""Large memories: variants of equal size, rows that stay, what is read in common, and resuming in the middle."""

import json
from typing import Any

import pytest
import torch

import neurocoder as nc
from neurocoder_lab import slots
from neurocoder_lab.cli import main
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments import large_memory
from neurocoder_lab.experiments.large_memory import EXPERIMENT, VARIANTS, LargeMemory
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute, folder_of

pytestmark = pytest.mark.usefixtures("digits")


def test_networks_have_as_many_parameters_as_the_sparse_one():
    with torch.device("meta"):
        sizes = {v: sum(p.numel() for p in large_memory.build(v, "domain", 1024).parameters()) for v in VARIANTS}
    alike = ("sparse", "top-2", "top-4", "ordinary", "heads-16", "heads-32", "heads-64", "mlp")
    assert all(abs(sizes[variant] / sizes["sparse"] - 1) < 0.02 for variant in alike)
    assert all(abs(sizes[v] / sizes["sparse"] - 1) < 0.1 for v in ("moe", "peer"))  # a whole number, a square
    assert sizes["slots-256"] < sizes["sparse"] < sizes["slots-4096"]


@pytest.mark.parametrize("variant", ["sparse", "learned", "ordinary", "residual", "moe", "peer"])
def test_a_run_ends_with_what_it_measures(variant, tmp_path):
    config = LargeMemory(variant=variant, budget="smoke", epochs=1)
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert {*EXPERIMENT.metrics} <= final.keys()
    if variant in ("moe", "peer"):
        assert "shared_reads" not in final
        return
    shared = torch.tensor(final["shared_reads"])
    assert shared.shape == (5, 5)
    assert torch.allclose(shared.diagonal(), torch.ones(5), atol=1e-3)
    assert torch.equal(shared, shared.t())
    assert len(final["overwritten"]) == 4


def test_a_run_that_was_stopped_ends_as_it_would_have(tmp_path):
    config = LargeMemory(method="oewc", budget="smoke", epochs=2, penalty=10.0)
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


def test_all_classes_at_once_are_one_task(tmp_path):
    final = execute(EXPERIMENT, LargeMemory(scenario="joint", budget="smoke"), tmp_path, quiet=True)["final"]
    assert len(final["matrix"]) == 2
    with pytest.raises(LabError, match="nothing is forgotten"):
        LargeMemory(scenario="joint", method="si")
    with pytest.raises(LabError, match="adam has no penalty"):
        LargeMemory(penalty=1.0)


def test_tables_and_pictures(tmp_path):
    runs = []
    for variant, scenario in (("sparse", "domain"), ("sparse", "joint"), ("mlp", "domain"), ("mlp", "joint")):
        config = LargeMemory(variant=variant, scenario=scenario, budget="smoke", epochs=1)
        final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
        rows = [json.loads(line) for line in (folder_of(EXPERIMENT, config, tmp_path) / "metrics.jsonl").open()]
        runs.append({"config": vars(EXPERIMENT.resolve(config)), "final": final, "seconds": 1.0,
                     "curve": {name: [row[name] for row in rows] for name in rows[0]}})  # fmt: skip
    ((_, header, rows),) = large_memory.tabulate(Runs(runs))
    assert header == ["variant", "parameters", "domain, Adam", "joint, Adam"]
    assert len(rows) == 2
    assert len(large_memory.draw(Runs(runs))) == 2


def test_bench_slots_prints_ratios(capsys, monkeypatch):
    monkeypatch.setattr(slots, "WIDTH", 16)
    assert main(["bench", "slots", "--slots", "30", "100", "--repeats", "1"]) == 0
    printed = capsys.readouterr().out
    assert "100 slots, step" in printed
    assert "product keys" in printed
    assert "PEER" in printed
    assert main(["bench", "slots", "--slots", "2"]) == 1


def test_rows_that_no_task_reads_stay_where_they_were(tmp_path):
    task: Any = EXPERIMENT.start(EXPERIMENT.resolve(LargeMemory(budget="smoke")))
    before = task.model[0].memory.left.detach().clone()
    assert isinstance(task.model[0], nc.Linear)
    optimiser, (x, y) = task.optimiser, task.stream.train[0]
    with nc.trace(task.model) as seen:
        torch.nn.functional.cross_entropy(task.model(x), y).backward()
    optimiser.step()
    read = torch.zeros(1024, dtype=torch.bool)
    read[seen["0"].chosen.flatten()] = True
    assert torch.equal((task.model[0].memory.left != before).any(1), read)
