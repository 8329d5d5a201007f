"""Large memories: variants of equal size, rows that stay, what is read in common, and resuming in the middle."""

import json
import os
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import neurocoder as nc
from neurocoder_lab import cache, slots, tuning
from neurocoder_lab.cli import main
from neurocoder_lab.continual.large_memory import looker
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments import large_memory
from neurocoder_lab.experiments.large_memory import EXPERIMENT, VARIANTS, LargeMemory
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute, folder_of

pytestmark = pytest.mark.usefixtures("digits")


@pytest.mark.parametrize("width", [1024, 1280])
@pytest.mark.parametrize("scenario", ["domain", "class"])
def test_networks_have_as_many_parameters_as_the_sparse_one(scenario, width):
    with torch.device("meta"):
        networks = {variant: large_memory.build(variant, scenario, width) for variant in VARIANTS}
    sizes = {v: sum(p.numel() for p in net.parameters() if p.requires_grad) for v, net in networks.items()}
    alike = (
        "balanced",
        "balanced-512",
        "balanced-winners",
        "top-2",
        "top-4",
        "ordinary",
        "heads-32",
        "heads-512",
        "soft-reads",
        "winners",
        "mlp",
    )
    assert all(abs(sizes[variant] / sizes["sparse"] - 1) < 0.02 for variant in alike)
    assert all(0.95 < sizes[v] / sizes["sparse"] < 1.1 for v in ("moe", "peer"))  # a whole width, a square
    assert sizes["slots-256"] < sizes["slots-4096"] < sizes["sparse"]
    assert sizes["linear"] < sizes["features"] < sizes["sparse"]


@pytest.mark.parametrize(
    "variant", ["sparse", "learned", "ordinary", "residual", "two-hidden", "winners", "moe", "peer"]
)
def test_a_run_ends_with_what_it_measures(variant, tmp_path):
    config = LargeMemory(variant=variant, budget="smoke", epochs=1, rate=1e-3)
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert {*EXPERIMENT.metrics} <= final.keys()
    if variant in ("winners", "moe", "peer"):
        assert "shared_reads" not in final
        return
    shared = torch.tensor(final["shared_reads"])
    assert shared.shape == (5, 5)
    assert torch.allclose(shared.diagonal(), torch.ones(5), atol=1e-3)
    assert torch.equal(shared, shared.t())
    assert len(final["overwritten"]) == len(final["reads_elsewhere"]) == 4
    assert (max(final["reads_elsewhere"]) > 0.001) == (variant == "learned")
    assert torch.allclose(torch.tensor(final["busiest"]).sum(0), torch.ones(100), atol=0.01)


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
            execute(EXPERIMENT, config, tmp_path / "parts", checkpoint_seconds=0, quiet=True)
    assert [*(folder / "checkpoints").iterdir()]
    parts = execute(EXPERIMENT, config, tmp_path / "parts", quiet=True)["final"]
    assert parts == whole


@pytest.mark.parametrize("variant", ["sparse", "shared-first", "two-hidden", "mlp"])
def test_each_task_has_outputs_of_its_own(variant):
    network = large_memory.build(variant, "task", 1024)
    assert network(torch.randn(3, 1024), 4).shape == (3, 2)


@pytest.mark.parametrize("variant", ["sparse", "ordinary", "learned"])
def test_rows_begin_at_zero_and_are_all_that_learns_but_addresses(variant):
    (rows,) = network = large_memory.build(variant, "domain", 1024)
    assert not network(torch.randn(3, 1024)).any()
    trained = {name for name, p in rows.layer.memory.named_parameters() if p.requires_grad}
    assert [name for name in trained if name.startswith("right")]
    assert len(trained) == 1 + (variant == "learned")


def test_each_has_the_rate_that_was_chosen_for_it_or_the_nearest(monkeypatch):
    def row(variant, scenario, dataset, **means):
        place = {"variant": variant, "scenario": scenario, "dataset": dataset}
        tried = [{"values": {"rate": float(r)}, "n": 3, "mean": m, "std": 0.0} for r, m in means.items()]
        return {"experiment": "large-memory", "place": place, "lower": False, "tried": tried}

    rows = [
        row("sparse", "domain", "mnist", **{"1e-4": 90.0, "3e-4": 80.0}),
        row("top-2", "domain", "mnist", **{"1e-4": 80.0, "3e-4": 91.0}),
        row("sparse", "joint", "mnist", **{"1e-2": 90.0}),
        row("sparse", "domain", "cifar10", **{"1e-5": 90.0}),
    ]
    monkeypatch.setattr(tuning, "known", lambda: rows)
    for rate, *place in (
        (1e-4, "sparse", "domain", "mnist"),
        (0.01, "sparse", "joint", "mnist"),
        (1e-4, "sparse", "class", "mnist"),
        (1e-5, "sparse", "joint", "cifar10"),
        (3e-4, "top-2", "joint", "cifar10"),
        (1e-4, "mlp", "domain", "mnist"),
    ):
        variant, scenario, dataset = place
        config = LargeMemory(variant=variant, scenario=scenario, dataset=dataset)
        assert EXPERIMENT.resolve(config).rate == rate


def test_all_classes_at_once_are_one_task(tmp_path):
    final = execute(EXPERIMENT, LargeMemory(scenario="joint", budget="smoke"), tmp_path, quiet=True)["final"]
    assert len(final["matrix"]) == 2
    with pytest.raises(LabError, match="nothing is forgotten"):
        LargeMemory(scenario="joint", method="si")
    with pytest.raises(LabError, match="moe learns by adam alone: penalties are chosen for memories and mlp"):
        LargeMemory(variant="moe", method="si")
    with pytest.raises(LabError, match="balanced learns by adam alone"):
        LargeMemory(variant="balanced", method="oewc")
    with pytest.raises(LabError, match="cifar10 is learned by adam alone: penalties are chosen on mnist"):
        LargeMemory(dataset="cifar10", method="si")
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
    tried = [{"values": {"rate": rate}, "n": 3, "mean": 70 - rate, "std": 1.0} for rate in (0.25, 2.0)]
    place = {"variant": "sparse", "scenario": "domain", "dataset": "mnist"}
    row = {"experiment": "large-memory", "place": place, "lower": False, "tried": tried}
    monkeypatch.setattr(tuning, "known", lambda: [row])
    (_, header, rows), (_, _, held_out) = large_memory.tabulate(Runs(runs))
    assert header[2:] == ["trained parameters", "domain, Adam", "joint, Adam", "domain, Adam: each just learned"]
    assert [line[0] for line in rows] == ["sparse", "mlp"]
    assert rows[0][2] == "131,074 to 655,370"
    assert [line[::2] + line[3:] for line in held_out] == [["sparse", "0.25", "69.75 ± 1 (3)"]]
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
@pytest.mark.parametrize("variant", ["sparse", "winners"])
def test_what_was_looked_up_once_is_what_is_searched(variant, scenario, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    network, x, task = large_memory.build(variant, scenario, 1024), torch.randn(9, 1024), (3,) * (scenario == "task")
    for name, parameter in network.named_parameters():
        if "right" in name or "rows" in name:
            torch.nn.init.normal_(parameter)
    look: Any = looker(network)
    found = look.look(x)
    wanted = network(x, *task)
    assert wanted.std() > 0.01
    assert torch.equal(network(found, *task), wanted)
    assert not torch.equal(network(look.look(x.flip(0)), *task), wanted)
    files = [*(cache.folder() / "reads").iterdir()]
    assert len(files) == 2
    assert torch.equal(look.look(x), found)
    files[0].write_bytes(b"broken")
    assert torch.equal(look.look(x), found)
    torch.testing.assert_close(network(look.look(x.flip(0)), *task), wanted.flip(0))


def test_images_are_looked_up_only_where_nothing_before_the_rows_learns():
    once = ("sparse", "heads-32", "winners", "features")
    often = ("residual", "shared-first", "learned", "top-2", "two-hidden", "mlp")
    with torch.device("meta"):
        networks = [large_memory.build(variant, "task", 64) for variant in (*once, *often)]
    assert [looker(network) is not None for network in networks] == [True] * len(once) + [False] * len(often)


def test_features_that_were_looked_up_once_are_those_of_every_step():
    network, x = large_memory.build("features", "domain", 64), torch.randn(9, 64)
    look: Any = looker(network)
    torch.testing.assert_close(network(look.look(x)), network(x))
    assert not torch.allclose(network(look.look(x.flip(0))), network(x))


def test_a_task_moves_nothing_of_another_one():
    config = EXPERIMENT.resolve(LargeMemory(scenario="task", budget="smoke", epochs=1, rate=0.01))
    learner: Any = EXPERIMENT.start(config)
    learner.attach(Accelerator(cpu=True))
    for index in range(learner.ends[1]):
        if index == learner.ends[0]:
            before = [head.layer.memory.right.detach().clone() for head in learner.model.heads]
        learner.step(index)
    now = [head.layer.memory.right for head in learner.model.heads]
    assert [not torch.equal(*pair) for pair in zip(before, now, strict=True)] == [False, True, False, False, False]


def test_a_cache_keeps_what_was_made_last(tmp_path):
    for turn in range(4):
        file = tmp_path / f"{turn}.safetensors"
        cache.kept(file, "stamp", lambda turn=turn: ({"x": torch.full((100,), float(turn))}, {}))
        os.utime(file, (turn, turn))
    cache.trim(tmp_path, 2 * file.stat().st_size)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["2.safetensors", "3.safetensors"]
    assert cache.kept(file, "other", lambda: ({"x": torch.ones(1)}, {"a": "b"}))[0]["x"].shape == (1,)
    assert cache.kept(file, "other", lambda: pytest.fail("it is there"))[1] == {"a": "b", "stamp": "other"}
