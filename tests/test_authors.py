"""compat="authors" is the authors' layer: tests/oracle holds numbers made by their own code."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import neurocoder as nc

FILES = sorted((Path(__file__).parent / "oracle").glob("*.safetensors"))
# Their cosines have 1e-6 added to the norms, ours to the squared norms: that much for norms around 0.1.
TOLERANCE = 1e-4


def read(path):
    with safe_open(path, framework="pt") as file:
        options = json.loads(file.metadata()["options"])
        return options, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def build(options, tensors):
    layer = nc.Linear(**options, dtype=torch.float64)
    state = {name.removeprefix("state."): t for name, t in tensors.items() if name.startswith("state.")}
    layer.load_state_dict(state)
    return layer


def away(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def test_there_are_numbers():
    assert len(FILES) == 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_outputs_gradient_and_orthogonal_loss_are_theirs(path):
    options, tensors = read(path)
    layer = build(options, tensors)
    y = layer(tensors["x"])
    y.square().sum().backward()
    assert away(y, tensors["y"]) < TOLERANCE
    assert away(layer.memory.left.grad, tensors["left_gradient"]) < TOLERANCE
    assert abs(nc.orthogonality(layer) - tensors["orthogonality"]) < 1e-9


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_comparison_can_fail(path):
    """Cosines that are not divided by K are seen."""
    options, tensors = read(path)
    layer = build(options | {"sharpness": 10.0 if options["steps"] > 1 else 1.0}, tensors)
    assert away(layer(tensors["x"]), tensors["y"]) > 0.05


def test_a_frozen_base_keeps_the_authors_sharpness():
    model = torch.nn.Sequential(torch.nn.Linear(12, 9))
    nc.recode(model, "0", base="frozen", slots=7, key_dim=4, compat="authors")
    assert model[0].sharpness == 1 / 4
