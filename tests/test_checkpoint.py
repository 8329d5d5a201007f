"""Checkpoints: round trips, recipes, and files that do not fit."""

import copy
import json
import resource
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import neurocoder as nc


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3))


X = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))
RECIPES = [
    {"slots": 5, "heads": 2},
    {"slots": 5, "steps": 3, "least_used": 2, "residual": True},
    {"slots": 5, "steps": 2, "least_used": 2, "compat": "authors"},
    {"slots": 5, "steps": 2, "controller": 7, "least_used": 1, "rules": nc.Rules(gate="state", free_keys=("left",))},
    {"slots": 5, "steps": 2, "base": "frozen"},
    {"slots": 5, "steps": 2, "least_used": 2, "residual": True, "controller_sees": "read"},
]


@pytest.mark.parametrize("options", RECIPES)
def test_a_plain_model_becomes_the_saved_one(options, tmp_path):
    model = plain()
    nc.recode(model, ["0", "3"], **options)
    model(X)  # moves the statistics of the batch norm
    model.eval()
    nc.save(model, tmp_path / "m.safetensors")
    torch.manual_seed(9)
    other = plain().eval()
    assert nc.load(other, tmp_path / "m.safetensors") is other
    assert torch.equal(other(X), model(X))
    # and a model that is re-coded already is only filled
    layer = other[3]
    nc.load(other, tmp_path / "m.safetensors")
    assert other[3] is layer


def test_a_shared_memory_is_saved_once_and_shared_again(tmp_path):
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))

    model = build()
    nc.recode(model, "0", slots=4)
    nc.recode(model, "1", slots=4, memory=model[0].memory)
    nc.save(model, tmp_path / "m.safetensors")
    assert "1.memory.left" not in load_file(tmp_path / "m.safetensors")
    other = nc.load(build(), tmp_path / "m.safetensors")
    assert other[1].memory is other[0].memory
    x = torch.randn(3, 6)
    assert torch.equal(other(x), model(x))


def test_saving_replaces_a_file_whole_or_not_at_all(tmp_path):
    file = tmp_path / "m.safetensors"
    model = plain()
    nc.recode(model, "3", slots=4)
    nc.save(model, file)
    before = file.read_bytes()
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limit[1]))  # as if the disk were full half-way
    try:
        with pytest.raises(Exception, match="File too large"):
            nc.save(model, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.fixture
def saved(tmp_path):
    model = plain()
    nc.recode(model, "3", slots=4)
    nc.save(model, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def header_of(file) -> dict:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return json.loads(opened.metadata()["neurocoder"])


def rewrite(file, change) -> None:
    header = header_of(file)
    change(header)
    save_file(load_file(file), file, metadata={"neurocoder": json.dumps(header)})


def refuses(file, message: str, model: nn.Module | None = None) -> None:
    model = plain() if model is None else model
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    with pytest.raises((ValueError, FileNotFoundError, TypeError), match=message):
        nc.load(model, file)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_missing_truncated_and_foreign_files(saved, tmp_path):
    refuses(tmp_path / "absent", "no such file")
    data = saved.read_bytes()
    for size in (0, 7, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:size])
        refuses(tmp_path / "cut", "not a whole safetensors file")
    torch.save(plain().state_dict(), tmp_path / "pickle.pt")
    refuses(tmp_path / "pickle.pt", "not a whole safetensors file")
    save_file(plain().state_dict(), tmp_path / "foreign")
    refuses(tmp_path / "foreign", "not one written by nc.save")


def test_recipes_that_do_not_fit(saved):
    refuses(saved, "re-codes '3', where this model has nothing", nn.Sequential(nn.Linear(2, 2)))
    refuses(saved, "'3', where this model has ReLU", nn.Sequential(*plain()[:3], nn.ReLU()))
    wide = plain()
    wide[3] = nn.Linear(64, 9)
    refuses(saved, r"3.bias is \(8,\) in the file and \(9,\) in the model", wide)
    longer = nn.Sequential(*plain(), nn.Linear(3, 3))
    refuses(saved, r"5.weight is missing in the file", longer)
    other = plain()
    nc.recode(other, "3", slots=5)
    refuses(saved, "where this model has Linear, of other options", other)


def test_a_recipe_from_outside_builds_only_known_layers(saved):
    rewrite(saved, lambda header: header["layers"][0].update(layer="os.system"))
    refuses(saved, r"unknown layer 'os.system' in the recipe; known are .*Conv2d, Linear.*import that first")


def test_sharing_must_agree(tmp_path):
    apart = nn.Sequential(nc.Linear(6, 6, slots=4), nc.Linear(6, 6, slots=4))
    shared = nn.Sequential(nc.Linear(6, 6, slots=4))
    shared.append(nc.Linear(6, 6, slots=4, memory=shared[0].memory))
    nc.save(apart, tmp_path / "apart")
    nc.save(shared, tmp_path / "shared")
    refuses(tmp_path / "apart", "share memories otherwise", shared)
    refuses(tmp_path / "shared", "share memories otherwise", apart)


def test_tied_tensors_must_agree(tmp_path):
    def build() -> nn.ModuleDict:
        return nn.ModuleDict({"embed": nn.Embedding(7, 4), "out": nn.Linear(4, 7, bias=False)})

    tied = build()
    tied["out"].weight = tied["embed"].weight
    nc.save(build(), tmp_path / "apart")
    refuses(tmp_path / "apart", "ties tensors otherwise", tied)


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["options"].update(slots="x"),
        lambda entry: entry["options"].update(slotz=3),
        lambda entry: entry["options"]["rules"].pop("free_keys"),
        lambda entry: entry["options"]["rules"].update(order="zzz"),
    ],
)
def test_a_recipe_that_cannot_be_followed_names_file_and_layer(saved, change):
    rewrite(saved, lambda header: change(header["layers"][0]))
    refuses(saved, "m.safetensors: its recipe for '3' does not work here")


def test_a_frozen_recipe_that_does_not_fit_freezes_nothing(tmp_path):
    model = plain()
    nc.recode(model, "3", slots=4, base="frozen")
    nc.save(model, tmp_path / "m")
    other = nn.Sequential(*plain(), nn.Linear(3, 3))
    refuses(tmp_path / "m", "missing in the file", other)
    assert all(p.requires_grad for p in other.parameters())


def test_a_file_is_as_readable_as_any_other(saved):
    other = saved.with_name("other")
    other.write_text("")
    assert saved.stat().st_mode == other.stat().st_mode


def test_a_recipe_of_another_version(saved):
    rewrite(saved, lambda header: header.update(format=2))
    refuses(saved, "of another version; this one reads format 1")


def test_a_recipe_that_is_no_recipe(saved):
    save_file(load_file(saved), saved, metadata={"neurocoder": "nonsense"})
    refuses(saved, "of another version")
    save_file(load_file(saved), saved, metadata={"neurocoder": json.dumps({"format": 1, "layers": [1], "aliases": {}})})
    refuses(saved, "malformed")


def test_a_layer_the_library_does_not_know_is_not_saved(tmp_path):
    class Mine(nc.Linear):
        pass

    with pytest.raises(TypeError, match=r"is a Mine, a layer this library cannot rebuild.*put @nc\.register above"):
        nc.save(nn.Sequential(Mine(4, 4, slots=2)), tmp_path / "m")
    assert not list(tmp_path.iterdir())
