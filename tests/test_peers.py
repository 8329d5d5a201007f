"""The peers: against plain loops, where their cleverness vanishes, and with bad input."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.peers import FiLM, HyperLinear, LowRank, MixtureOfExperts, StoredProgramMemory
from tests.reference import mixture
from tests.strategies import shake

LAYERS = {
    "moe": (MixtureOfExperts, {"experts": 4, "top_k": 2}),
    "moe of one": (MixtureOfExperts, {"experts": 4, "dispatch": "dense"}),
    "nsm": (StoredProgramMemory, {"programs": 3, "key_dim": 4}),
    "hyper": (HyperLinear, {"layers": 2, "hidden": 7}),
    "film": (FiLM, {}),
    "low rank": (LowRank, {"rank": 2}),
}


def make(kind: str, bias: bool = True, dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layer, options = LAYERS[kind]
    return shake(layer(6, 5, bias, dtype=dtype, **options)).eval()


def reference(layer: nn.Module, x, control=None):
    """One row at a time, as the papers write it; what decides looks at the control of the row."""
    rows = []
    for row, seen in zip(x, x if control is None else control, strict=True):
        if isinstance(layer, MixtureOfExperts):
            rows.append(mixture(layer, row, layer.gate @ seen))
        elif isinstance(layer, StoredProgramMemory):
            query, strength = layer.query(seen)[:-1].tanh(), F.softplus(layer.query(seen)[-1])
            scores = [strength * F.cosine_similarity(query, key.tanh(), dim=0) for key in layer.key]
            weights = torch.stack(scores).softmax(0)
            weight = sum(w * program.weight for w, program in zip(weights, layer.programs, strict=True))
            y = weight @ row
            if layer.programs[0].bias is not None:
                y = y + sum(w * program.bias for w, program in zip(weights, layer.programs, strict=True))
            rows.append(y)
        elif isinstance(layer, HyperLinear):
            weight = layer.linear.weight.clone()
            for column, scale in enumerate(layer.generator(seen)):
                weight[:, column] *= scale
            rows.append(F.linear(row, weight, layer.linear.bias))
        elif isinstance(layer, LowRank):
            weight = sum(torch.outer(left, right) for left, right in zip(layer.left, layer.right, strict=True))
            rows.append(row @ weight + (0 if layer.bias is None else layer.bias))
        else:
            made = layer.generator(seen)
            rows.append(made[:5] * layer.linear(row) + made[5:])
    return torch.stack(rows)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_peer_is_its_equations(kind, bias):
    layer = make(kind, bias)
    x = torch.randn(9, 6).double().requires_grad_()
    weight = torch.randn(9, 5).double()
    parameters = [x, *layer.parameters()]
    found = [layer(x), *torch.autograd.grad((layer(x) * weight).sum(), parameters, allow_unused=True)]
    y = reference(layer, x)
    wanted = [y, *torch.autograd.grad((y * weight).sum(), parameters, allow_unused=True)]
    for a, b in zip(found, wanted, strict=True):
        a, b = (torch.zeros(()) if v is None else v for v in (a, b))
        assert (a - b).abs().max() < 1e-9
    shake(layer)
    assert not torch.allclose(layer(x), found[0])


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "low rank"])
def test_what_decides_looks_at_the_control(kind, tmp_path):
    torch.manual_seed(0)
    kind, options = LAYERS[kind]
    layer = shake(kind(6, 5, control_features=3, dtype=torch.float64, **options)).eval()
    x, control = torch.randn(2, 4, 6).double(), torch.randn(2, 4, 3).double().requires_grad_()
    parameters = [control, *layer.parameters()]
    weight = torch.randn(8, 5).double()
    y, wanted = layer(x, control).flatten(0, 1), reference(layer, x.flatten(0, 1), control.flatten(0, 1))
    torch.testing.assert_close(y, wanted)
    found, wanted = (torch.autograd.grad((o * weight).sum(), parameters, allow_unused=True) for o in (y, wanted))
    for a, b in zip(found, wanted, strict=True):
        a, b = (torch.zeros(()) if v is None else v for v in (a, b))
        assert (a - b).abs().max() < 1e-9
    one = control[:, 0].detach()  # one control a sequence
    with nc.trace(layer) as seen:
        y = layer(x, one)
    torch.testing.assert_close(y, layer(x, one[:, None].expand(2, 4, 3)))
    assert all(value.shape[0] == 2 and value.dim() == 2 for value in vars(seen[""]).values() if value is not None)
    assert not torch.allclose(y, layer(x, -one))
    assert layer(x[:0], one[:0]).shape == (0, 4, 5)
    with pytest.raises(ValueError, match="built with control_features=3: call it with control="):
        layer(x)
    with pytest.raises(ValueError, match=r"expects control of shape \(\.\.\., 3\), got \(2, 4\)"):
        layer(x, torch.randn(2, 4).double())
    with pytest.raises(ValueError, match="must begin that of x"):
        layer(x, torch.randn(3, 3).double())
    model = nn.Sequential(nn.Linear(6, 5))
    nc.recode(model, "0", layer=kind, control_features=3, **options)
    nc.save(model, tmp_path / "m.safetensors")
    again = nc.load(nn.Sequential(nn.Linear(6, 5)), tmp_path / "m.safetensors").eval()
    model.eval()
    torch.testing.assert_close(again[0](x.float(), one.float()), model[0](x.float(), one.float()))


def test_noise_decides_once_for_all_rows_of_a_control():
    torch.manual_seed(0)
    layer = MixtureOfExperts(6, 5, experts=4, control_features=3)
    x = torch.randn(1, 6).expand(2, 50, 6)
    y = layer(x, torch.randn(2, 3))
    torch.testing.assert_close(y, y[:, :1].expand_as(y))
    assert not torch.allclose(y[0], y[1])


@pytest.mark.parametrize("kind", LAYERS)
def test_any_leading_shape(kind):
    layer = make(kind)
    x = torch.randn(2, 3, 6).double()
    torch.testing.assert_close(layer(x), layer(x.flatten(0, 1)).view(2, 3, 5))
    torch.testing.assert_close(layer(x[0, 0]), layer(x)[0, 0])
    empty = layer(torch.zeros(0, 3, 6).double())
    assert empty.shape == (0, 3, 5)
    empty.sum().backward()
    assert layer(torch.zeros(2, 0, 6).double()).shape == (2, 0, 5)
    assert layer.to("meta")(torch.zeros(4, 6, device="meta", dtype=torch.float64)).shape == (4, 5)


@pytest.mark.parametrize(
    "layer",
    [
        MixtureOfExperts(6, 5, experts=1),
        StoredProgramMemory(6, 5, programs=1),
        HyperLinear(6, 5, layers=2),
        FiLM(6, 5),
        nc.modular.Linear(6, 5, modules=1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_without_anything_to_choose_it_is_the_dense_layer(layer):
    dense = next(module for module in layer.modules() if isinstance(module, nn.Linear) and module.out_features == 5)
    x = torch.randn(8, 6)
    torch.testing.assert_close(layer(x), dense(x))
    with torch.no_grad():
        dense.weight += 1
    torch.testing.assert_close(layer(x), dense(x))


@pytest.mark.parametrize("kind", ["nsm", "hyper", "film", "low rank"])
def test_a_fresh_layer_is_as_loud_as_a_dense_one(kind):
    torch.manual_seed(0)
    layer, options = LAYERS[kind]
    x = torch.randn(500, 100)
    ratio = layer(100, 100, **options)(x).var() / nn.Linear(100, 100)(x).var()
    assert 0.8 < ratio < 1.25


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_made_on_meta_starts_like_any_other(kind):
    layer, options = LAYERS[kind]
    made = layer(6, 5, device="meta", **options).to_empty(device="cpu")
    torch.manual_seed(3)
    made.reset_parameters()
    fresh = layer(6, 5, **options)
    torch.manual_seed(3)
    fresh.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("kind", LAYERS)
def test_recode_save_load_trace_diagnose(kind, tmp_path):
    layer, options = LAYERS[kind]

    def network():
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    model = network()
    assert nc.recode(model, "0", layer=layer, **options) == ["0"]
    shake(model).eval()
    x = torch.randn(10, 6)
    nc.save(model, tmp_path / "m.safetensors")
    again = nc.load(network(), tmp_path / "m.safetensors").eval()
    assert type(again[0]) is layer
    assert torch.equal(again(x), model(x))
    with nc.trace(model) as seen:
        model(x)
    assert all(value.shape[0] == 10 for value in vars(seen["0"]).values() if value is not None)
    report = nc.diagnose(model, x)["0"]
    assert report.inputs == 10
    assert "dead" in str(report)
    with pytest.raises(TypeError, match=r"an nn.Conv2d cannot become an nc\.peers"):
        nc.recode(nn.Sequential(nn.Conv2d(3, 4, 3)), "0", layer=layer, **options)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_frozen_base_is_the_original_to_the_bit_and_never_moves(kind, tmp_path):
    layer, options = LAYERS[kind]

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))

    model, x = network(), torch.randn(10, 6)
    if kind in ("moe", "moe of one", "nsm"):
        with pytest.raises(TypeError, match="needs a layer that can start as the one it replaces"):
            nc.recode(model, "*", layer=layer, base="frozen", **options)
        assert type(model[0]) is nn.Linear
        return
    before = network()(x)
    nc.recode(model, "*", layer=layer, base="frozen", **options)
    assert torch.equal(model(x), before)
    held = {p: p.detach().clone() for p in model.parameters()}
    optimiser = torch.optim.Adam(model.parameters())
    for _ in range(2):  # the first step moves the maps that start at zero, the second what is before them
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()
    bases = {p for module in model[::2] for p in module.base.parameters()}
    assert len(bases) == 3
    assert all(torch.equal(p, old) == (p in bases) for p, old in held.items())
    nc.save(model, tmp_path / "m.safetensors")
    again = nc.load(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)), tmp_path / "m.safetensors")
    assert torch.equal(again(x), model(x))
    assert not any(p.requires_grad for p in again[0].base.parameters())
    model[0].reset_parameters()
    assert torch.equal(model[0](x), network()[0](x))


def test_low_rank_is_calibrated_at_every_size_and_looks_at_no_control():
    torch.manual_seed(0)
    x = torch.randn(4000, 64)
    for out, rank in ((1, 1), (3, 1), (256, 2), (10, 64)):
        layer = LowRank(64, out, bias=False, rank=rank)
        torch.testing.assert_close((layer.left.t() @ layer.right).square().sum(), torch.tensor(out / 3))
        assert layer(x).var(0).mean().item() == pytest.approx(1 / 3, rel=0.15)  # of 64 inputs, 4000 draws
    assert torch.equal(layer(x, torch.randn(4000, 7)), layer(x))
    with nc.trace(layer) as seen:
        layer(x)
    torch.testing.assert_close(seen[""].strength[0, 5], (layer.left[5] @ x[0]).abs() * layer.right[5].norm())
    with pytest.raises(TypeError, match="rank must be a whole number"):
        LowRank(6, 5, rank=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_compile(kind, mode):
    torch._dynamo.reset()
    layer = make(kind).train(mode == "train" and "moe" not in kind)  # compiled noise has a stream of its own
    x = torch.randn(8, 6).double()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))


@pytest.mark.parametrize("kind", LAYERS)
def test_autocast_and_torch_func(kind):
    layer = make(kind, dtype=torch.float32)
    x = torch.randn(8, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(x)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), layer(x), rtol=0.1, atol=0.1)
    if "moe" in kind:
        layer.dispatch = "dense"
    parameters = dict(layer.named_parameters())
    torch.testing.assert_close(vmap(lambda row: functional_call(layer, parameters, (row,)))(x), layer(x))


BAD = [
    (MixtureOfExperts, {"experts": 2, "top_k": 3}, "top_k is at most the number of experts, 2; got 3"),
    (MixtureOfExperts, {"experts": 0}, "experts must be"),
    (MixtureOfExperts, {"experts": 2, "dispatch": "fast"}, "'sparse' or 'dense', got 'fast'"),
    (StoredProgramMemory, {"programs": 0}, "programs must be"),
    (StoredProgramMemory, {"programs": 2, "key_dim": 0}, "key_dim must be"),
    (HyperLinear, {"layers": 3}, "layers must be 1 or 2, got 3"),
    (FiLM, {"layers": 2, "hidden": 0}, "hidden must be"),
    (FiLM, {"control_features": 0}, "control_features must be at least 1"),
    (LowRank, {"rank": 0}, "rank must be"),
]


@pytest.mark.parametrize(("layer", "options", "message"), BAD)
def test_bad_options(layer, options, message):
    with pytest.raises(ValueError, match=message):
        layer(6, 5, **options)
    model = nn.Sequential(nn.Linear(6, 5))
    with pytest.raises(ValueError, match=message):
        nc.recode(model, "0", layer=layer, **options)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("kind", LAYERS)
def test_bad_input(kind):
    layer = make(kind)
    with pytest.raises(ValueError, match=r"nc\.peers\.\w+ expects x of shape \(\.\.\., 6\), got \(3, 7\)"):
        layer(torch.randn(3, 7).double())
    with pytest.raises(TypeError, match="floating point"):
        layer(torch.ones(3, 6, dtype=torch.int64))
    with pytest.raises(TypeError, match="convert one of them"):
        layer(torch.randn(3, 6))
