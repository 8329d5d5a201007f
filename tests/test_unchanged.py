"""What explicit options give does not change: how layers start, what they compute, and that checkpoints still load.

tests/unchanged/ was written by the commit before `controller_sees` existed, with

    PYTHONPATH=src:. python -m tests.test_unchanged tests/unchanged

Outputs and gradients were written once more, by the commit before `program/` existed and after it was seen to give the
old ones on the processor that wrote them: the weights came from a power in float32, which processors round differently.

A change that is meant to alter a result writes these files anew, and says so: convolutions start otherwise since the
weights of their controllers start small (docs/log.md); what they compute with given weights is as before.
"""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import neurocoder as nc

HERE = Path(__file__).parent / "unchanged"
AUTHORS = {"compat": "authors", "sharpness": 2.0}
USAGE = {"steps": 3, "heads": 2, "least_used": 2}
AS_WRITTEN = {"first_step": "first-slots", "usage": "all", "least_used": "one", "content": "peak"}
LINEAR = {
    "one component": {},
    "heads": {"heads": 3},
    "steps": {"steps": 3},
    "usage": USAGE,
    "residual": {"heads": 2, "residual": True},
    "usage, residual": USAGE | {"residual": True},
    "no bias": {"heads": 2, "bias": False},
    "units": {"steps": 2, "least_used": 1, "controller": 3},
    "linear controller": {"steps": 2, "least_used": 2, "controller": "linear"},
    "sharp": {"heads": 2, "sharpness": 50.0},
    "keys of one": {"heads": 2, "key_dim": 1},
    "many slots": {"slots": 9, "heads": 2},
    "control": {"heads": 2, "control_features": 3},
    "authors": AUTHORS | {"heads": 2},
    "authors, usage, residual": AUTHORS | USAGE | {"residual": True},
    "state gates": USAGE | {"rules": nc.Rules(gate="state", integration="lstm"), "residual": True},
    "rules": USAGE | {"rules": nc.Rules(**AS_WRITTEN, order="first", initial_state="learned")},
    "ascending": {"heads": 3, "rules": nc.Rules(order="ascending", free_keys=("left", "values"))},
    "frozen base": {"heads": 2, "base": "frozen"},
}
CONV2D = {
    "conv": {"heads": 2},
    "conv, groups, usage, residual": USAGE | {"groups": 2, "stride": 2, "padding": 1, "residual": True},
    "conv, circular, authors": AUTHORS | {"heads": 2, "padding": 1, "padding_mode": "circular"},
    "conv, frozen base": {"steps": 2, "base": "frozen"},
}


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The layer, as its seed makes it, and its input."""
    torch.manual_seed(0)
    options = {"slots": 4, "key_dim": 2} | (LINEAR | CONV2D)[name]
    if name in LINEAR:
        args, kind, plain, x = (5, 4), nc.Linear, nn.Linear, torch.randn(3, 5)
    else:
        args, kind, plain, x = (4, 4, 2), nc.Conv2d, nn.Conv2d, torch.randn(2, 4, 3, 3)
    if options.pop("base", None):
        model = nn.Sequential(plain(*args))
        nc.recode(model, "0", base="frozen", **options)
        return model[0], (x,)
    layer = kind(*args, **options)
    return layer, (x, torch.randn(3, 3)) if name == "control" else (x,)


def digest(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """A few sums of all numbers of a state, each number with weights of its own."""
    numbers = torch.cat([state[name].double().flatten() for name in sorted(state)])
    weights = torch.outer(torch.tensor([0.1, 1.0, 2.3]), torch.arange(len(numbers))).cos().double()
    return (weights @ numbers).float()


def outputs(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Output and gradient of the input in float64, for a state that is the same whatever the layer started as."""
    own = layer.state_dict()
    sizes = [own[name].numel() for name in sorted(own)]
    # in float64: processors round a power in float32 otherwise, and a sine makes much of it
    pieces = torch.sin(1 + torch.arange(sum(sizes), dtype=torch.float64) ** 1.3).float().split(sizes)
    layer.load_state_dict({name: piece.view_as(own[name]) for name, piece in zip(sorted(own), pieces, strict=True)})
    x, *control = (tensor.double() for tensor in given)
    y = layer.double()(x.requires_grad_(), *control)
    y.square().sum().backward()
    return {"y": y.detach().float(), "dx": x.grad.float()}


def recoded() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 2))
    nc.recode(model, "0", slots=2, heads=2, key_dim=2)
    nc.recode(model, "2", base="frozen", slots=2, steps=2, key_dim=2, least_used=1)
    nc.recode(model, "3", slots=2, key_dim=2, residual=True, **AUTHORS)
    return model


def write(folder: Path) -> None:
    found = {}
    for name in LINEAR | CONV2D:
        layer, given = build(name)
        found[f"{name}: start"] = digest(layer.state_dict())
        found |= {f"{name}: {what}": value for what, value in outputs(layer, given).items()}
    model = recoded()
    found["checkpoint: y"] = model(torch.ones(2, 1, 3, 3)).detach()
    save_file(found, folder / "layers.safetensors")
    nc.save(model, folder / "checkpoint.safetensors")


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    return load_file(HERE / "layers.safetensors")


@pytest.mark.parametrize("name", LINEAR | CONV2D)
def test_a_layer_starts_as_it_did(name, stored):
    # orthogonal matrices come from a decomposition: its rounding, and a gain measured with it
    start = digest(build(name)[0].state_dict())
    torch.testing.assert_close(start, stored[f"{name}: start"], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(start, 1.001 * start, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LINEAR | CONV2D)
def test_a_layer_computes_what_it_did(name, stored):
    found = outputs(*build(name))
    for what, value in found.items():
        torch.testing.assert_close(value, stored[f"{name}: {what}"], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found["y"], 1.0001 * found["y"], rtol=1e-6, atol=1e-6)  # a small change would show


def test_a_checkpoint_written_before_loads(stored):
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 4), nn.Linear(4, 2))
    x = torch.ones(2, 1, 3, 3)
    for model in (plain, recoded()):
        nc.load(model, HERE / "checkpoint.safetensors")
        torch.testing.assert_close(model(x), stored["checkpoint: y"])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
