"""The experiment cifar, and the speed of its networks: sizes, refusals, small runs, ratios that decide claims."""

import json

import pytest
import torch
from torch import nn

from neurocoder_lab import claims, results, speed
from neurocoder_lab.cli import main
from neurocoder_lab.experiments import cifar
from neurocoder_lab.experiments.cifar import EXPERIMENT, Cifar
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute
from neurocoder_lab.sweep import grid
from tests.lab import pictures


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, classes in (("cifar10", 10), ("cifar100", 100)):
        for split, count in (("train", 400), ("test", 100)):
            pictures.write(folder, name, split, count, classes=classes, size=32)
    return {"NEUROCODER_DATA": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture(autouse=True)
def _here(places, monkeypatch):
    for name, value in places.items():
        monkeypatch.setenv(name, value)


def size(network, model, **more):
    with torch.device("meta"):
        return sum(p.numel() for p in cifar.build(network, 10, model, **more).parameters())


@pytest.mark.parametrize("network", cifar.NETWORKS)
def test_sizes(network):
    paper = {"mlp": 1.7e6, "lenet": 2.1e6, "densenet": 7.0e6}[network]
    assert size(network, "original", depth=100) == pytest.approx(paper, rel=0.06)
    assert size(network, "low-rank", depth=100) == pytest.approx(size(network, "neurocoder", depth=100), rel=0.01)


def test_mixtures_are_ten_times_as_large_where_all_dense_layers_are_one():
    for network, kinds in (("mlp", ("moe", "nsm")), ("lenet", ("moe-all-dense", "nsm-all-dense"))):
        for kind in kinds:
            assert size(network, kind) > 5 * size(network, "neurocoder")


def test_only_the_output_layer_of_a_convolutional_network_is_recoded():
    network = cifar.build("lenet", 100, "neurocoder")
    changed = [name for name, module in network.named_modules() if type(module).__module__.startswith("neurocoder.")]
    assert {name.split(".memory")[0].split(".controller")[0] for name in changed} == {"7.4"}
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_smoke_runs_and_their_table(tmp_path):
    runs = Runs()
    for network, model in (("mlp", "original"), ("mlp", "low-rank"), ("mlp", "neurocoder"), ("lenet", "moe")):
        top_k = 1 if model == "moe" else None
        config = EXPERIMENT.resolve(Cifar(budget="smoke", network=network, model=model, examples=128, top_k=top_k))
        result = execute(EXPERIMENT, config, tmp_path, quiet=True)
        curve = {"step": [1, 2], "test": [result["final"]["test"]] * 2}
        runs.append({"config": vars(config), **json.loads(json.dumps(result)), "curve": curve})
    title, header, rows = cifar.tabulate(runs)[0]
    assert title == "MLP, CIFAR-10, 2 epochs of 128 pictures"
    assert [row[0] for row in rows] == [cifar.NAMES[model] for model in ("original", "low-rank", "neurocoder")]
    assert cifar.tabulate(runs)[1][2][0][0] == "MoE, 1 of 10"
    assert rows[0][header.index("paper, best of 5")] == "52.06"
    assert [picture[:4] for _, picture in cifar.draw(runs)] == ["<svg"] * 2


def test_a_sweep_in_mixed_precision_says_so(tmp_path, capsys):
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path), "--budget", "smoke", "--dirty"]
    what = ["--network", "lenet", "--model", "neurocoder", "--seeds", "1", "--precision", "bf16"]
    assert main(["sweep", "cifar", *what, *places]) == 0
    runs = results.load(tmp_path, "cifar", True)
    assert [run["environment"]["precision"] for run in runs] == ["bf16"]
    assert cifar.tabulate(runs)[0][0] == "LeNet, CIFAR-10, 2 epochs of 256 pictures, bf16"
    assert runs[0]["command"].endswith("--seeds 1 --precision bf16 --network lenet --model neurocoder")
    assert main(["sweep", "cifar", *what[:-2], *places]) == 1
    assert "has some of these runs with --precision bf16, not no: ask for that" in capsys.readouterr().err
    assert main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "page.html"), "--dirty"]) == 0
    assert "; 1 of them in bf16" in (tmp_path / "page.html").read_text()
    (tmp_path / "cifar.json").unlink()
    assert main(["sweep", "cifar", *what[:-2], *places]) == 1
    assert "holds a run of another config (precision 'bf16', now 'no')" in capsys.readouterr().err


def test_densenet_and_a_hundred_classes(tmp_path):
    config = Cifar(budget="smoke", network="densenet", dataset="cifar100", examples=64, tested=20)
    full = EXPERIMENT.resolve(config)
    assert (full.depth, full.rate) == (10, 0.1)
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert final["steps"] == 4
    title = cifar.tabulate(Runs([{"config": vars(full), "final": final}]))[0][0]
    assert "DenseNet-10" in title
    assert "no verdict" in title
    assert [cifar.in_steps(done) for done in (0.0, 0.5, 0.8)] == [1.0, 0.1, 0.01]


def test_a_hundred_layers_take_twenty_steps_at_the_desk():
    axes = EXPERIMENT.axes | {"network": ("densenet",), "dataset": ("cifar10",), "depth": (100,)}
    configs = [EXPERIMENT.resolve(config) for config in grid(EXPERIMENT, axes, 1)]
    assert [config.model for config in configs] == [*cifar.MODELS[:6]]
    assert {(c.depth, c.epochs, c.examples // cifar.BATCH["densenet"], c.tested) for c in configs} == {
        (100, 1, 20, 100)
    }
    whole = EXPERIMENT.resolve(Cifar(network="densenet"))
    assert (whole.depth, whole.epochs, whole.examples) == (40, 5, 10_000)
    published = EXPERIMENT.resolve(Cifar(network="densenet", budget="paper", depth=100))
    assert published == EXPERIMENT.resolve(Cifar(network="densenet", budget="paper"))
    runs = Runs(
        {"config": vars(config), "final": {"test": 10.0, "train": 11.0, "parameters": 9}, "curve": {}}
        for config in (*configs, whole)
    )
    titles = [title for title, _, _ in cifar.tabulate(runs)]
    assert [title[:12] for title in titles] == ["DenseNet-40,", "DenseNet-100"]
    assert "1 epoch of 640 pictures" in titles[1]


def test_jitter_shifts_and_mirrors():
    torch.manual_seed(0)
    x = torch.zeros(200, 1, 32, 32, dtype=torch.uint8)
    x[:, :, 10, 12] = 9
    moved = cifar.jitter(x)
    assert (moved.flatten(1).sum(1) == 9).all()
    _, _, rows, columns = moved.nonzero(as_tuple=True)
    assert {*rows.tolist()} == {*range(6, 15)}
    assert {*columns.tolist()} == {*range(8, 17), *range(15, 24)}  # 31 - 12 = 19, mirrored


def test_it_learns(tmp_path):
    config = Cifar(budget="smoke", model="recommended", epochs=12, examples=360, measure="validation", rate=0.001)
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert final["validation"] > 50  # chance: 10
    assert "test" not in final


def test_lenet_may_pool_before_it_rectifies():
    torch.manual_seed(0)
    network = cifar.plain("lenet", 10, 0).double()
    first, pool, relu, second = network[:4]
    usual = nn.Sequential(first, relu, pool, second, relu, pool, *network[6:])
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    y, gradients = [], []
    for each in (network, usual):
        y.append(each(x))
        gradients.append(torch.autograd.grad(y[-1].square().sum(), [*network.parameters()]))
    assert torch.equal(*y)
    assert all(map(torch.equal, *gradients))


def test_a_sweep_leaves_all_dense_to_lenet():
    found = grid(EXPERIMENT, EXPERIMENT.axes | EXPERIMENT.main, 1)
    assert len(found) == 6 + 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "moe-all-dense"], "moe-all-dense is for lenet alone"),
        (["--model", "nsm", "--top-k", "5"], "nsm has no experts: --top-k is for moe and moe-all-dense"),
        (["--depth", "40"], "--network densenet alone has one"),
        (["--network", "densenet", "--depth", "41"], "4 and a multiple of 3"),
        (["--tested", "0"], "tested must be at least 1"),
        (["--model", "moe", "--top-k", "11"], "top_k must be 1 to 10, got 11"),
    ],
)
def test_wrong_use_is_told(tmp_path, capsys, words, said):
    assert main(["run", "cifar", *words, "--runs", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


def test_every_variant_can_be_timed(monkeypatch):
    monkeypatch.setattr(speed, "batch", lambda network: (torch.zeros(2, 3, 32, 32), torch.tensor([0, 1])))
    found = speed.compare("lenet", repeats=1, seed=0)
    assert {"original", "neurocoder", "nsm-all-dense", "hypernet", "film", "recommended-no-residual"} <= found.keys()
    assert found["original"]["step_ratio"] == 1.0
    assert found["nsm-all-dense"]["parameters"] == size("lenet", "nsm-all-dense")
    for network in speed.NETWORKS:
        assert next(iter(speed.variants(network))) == "original"


def test_the_output_layer_of_densenet_is_timed_alone():
    alone = speed.compare("densenet-output", repeats=1, seed=0)
    assert alone.keys() == speed.variants("densenet").keys()
    assert alone["original"]["parameters"] == 1169 * 10


@pytest.mark.parametrize(("ours", "verdict"), [(1.01, "holds"), (2.0, "contradicted")])
def test_ratios_decide_claims(tmp_path, capsys, monkeypatch, ours, verdict):
    def compare(network, repeats, seed):
        ratios = dict.fromkeys(speed.variants(network), 1.2) | {"original": 1.0, "neurocoder": ours}
        return {
            name: {"step_ratio": r + 0.001 * seed, "milliseconds": r, "parameters": 9} for name, r in ratios.items()
        }

    monkeypatch.setattr(speed, "source", lambda: {"commit": "abc", "dirty": False})
    monkeypatch.setattr(speed, "compare", compare)
    file, told = tmp_path / "speed.json", []
    for networks in (speed.NETWORKS[:1], speed.NETWORKS[1:]):  # the second adds to what the first wrote
        assert main(["bench", "networks", "--networks", *networks, "--out", str(file)]) == 0
        told.append(capsys.readouterr().out)
    assert all("1.20 (1.20 to 1.20)" in text for text in told)
    assert "--networks lenet densenet polynomial-gru ntm\n" in told[0]
    assert "the claims about speed lack" not in told[1]
    assert len(results.load(tmp_path, "speed").where(network="polynomial-gru")) == 3 * 4
    judged = {claim.id: claim.verdict for claim in claims.judge(tmp_path)}
    assert judged["nc-overhead"] == judged["nc-overhead-light"] == verdict
    assert main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().count("1.20 (1.20 to 1.20)") > len(speed.NETWORKS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "0"], "seeds must be at least 1"),
        (["--networks"], "--networks names none"),
        (["--out", "results"], "--out takes a JSON file"),
    ],
)
def test_wrong_use_of_the_benchmark_is_told(capsys, words, said):
    assert main(["bench", "networks", *words]) == 1
    assert said in capsys.readouterr().err
