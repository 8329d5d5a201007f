"""The peers: against plain loops, where their cleverness vanishes, and with bad input."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.peers import FiLM, HyperLinear, MixtureOfExperts, StoredProgramMemory
from tests.strategies import shake

LAYERS = {
    "moe": (MixtureOfExperts, {"experts": 4, "top_k": 2}),
    "moe of one": (MixtureOfExperts, {"experts": 4, "dispatch": "dense"}),
    "nsm": (StoredProgramMemory, {"programs": 3, "key_dim": 4}),
    "hyper": (HyperLinear, {"layers": 2, "hidden": 7}),
    "film": (FiLM, {}),
}


def make(kind: str, bias: bool = True, dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    layer, options = LAYERS[kind]
    return shake(layer(6, 5, bias, dtype=dtype, **options)).eval()


def moe_row(layer: MixtureOfExperts, x, gates, noise=None):
    """Eq. 1 to 5 of Shazeer et al. for one input, whose gates before top-k are given."""
    order = sorted(range(len(gates)), key=lambda i: -gates[i].item())[: layer.top_k]
    total = sum(gates[i].exp() for i in order)
    return sum(gates[i].exp() / total * layer.experts[i](x) for i in order)


def reference(layer: nn.Module, x):
    """One row at a time, as the papers write it."""
    rows = []
    for row in x:
        if isinstance(layer, MixtureOfExperts):
            rows.append(moe_row(layer, row, layer.gate @ row))
        elif isinstance(layer, StoredProgramMemory):
            query, strength = layer.query(row)[:-1].tanh(), F.softplus(layer.query(row)[-1])
            scores = [strength * F.cosine_similarity(query, key.tanh(), dim=0) for key in layer.key]
            weights = torch.stack(scores).softmax(0)
            weight = sum(w * program.weight for w, program in zip(weights, layer.programs, strict=True))
            y = weight @ row
            if layer.programs[0].bias is not None:
                y = y + sum(w * program.bias for w, program in zip(weights, layer.programs, strict=True))
            rows.append(y)
        elif isinstance(layer, HyperLinear):
            weight = layer.linear.weight.clone()
            for column, scale in enumerate(layer.generator(row)):
                weight[:, column] *= scale
            rows.append(F.linear(row, weight, layer.linear.bias))
        else:
            made = layer.generator(row)
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


@pytest.mark.parametrize("kind", ["nsm", "hyper", "film"])
def test_a_fresh_layer_is_as_loud_as_a_dense_one(kind):
    torch.manual_seed(0)
    layer, options = LAYERS[kind]
    x = torch.randn(500, 100)
    ratio = layer(100, 100, **options)(x).var() / nn.Linear(100, 100)(x).var()
    assert 0.8 < ratio < 1.25


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_sparse_and_dense_dispatch_are_equal(top_k):
    torch.manual_seed(0)
    sparse = shake(MixtureOfExperts(6, 5, experts=4, top_k=top_k, dtype=torch.float64))
    dense = copy.deepcopy(sparse)
    dense.dispatch = "dense"
    x, weight = torch.randn(20, 6).double(), torch.randn(20, 5).double()
    outputs = []
    for layer in (sparse, dense):
        torch.manual_seed(1)  # the noise of training
        y = layer(x)
        extra = nc.peers.balance(layer)[""]
        ((y * weight).sum() + extra.importance + extra.load).backward()
        outputs.append([y, *(p.grad for p in layer.parameters())])
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_reach_only_chosen_experts():
    layer = make("moe")
    x = torch.randn(1, 6).double()
    with nc.trace(layer) as seen:
        layer(x).sum().backward()
    weights = seen[""].weights[0]
    assert (weights > 0).sum() == 2
    for weight, expert in zip(weights, layer.experts, strict=True):
        assert (expert.weight.grad is not None) == (weight > 0)


def test_balance_losses_are_those_of_the_paper():
    """Importance and load of Eq. 6 to 10, one input and one expert at a time."""
    torch.manual_seed(0)
    layer = shake(MixtureOfExperts(6, 5, experts=4, top_k=2, dtype=torch.float64))
    x = torch.randn(7, 6).double()
    torch.manual_seed(5)
    y = layer(x)
    torch.manual_seed(5)
    noise = torch.randn(7, 4, dtype=torch.float64)
    importance, load = torch.zeros(4).double(), torch.zeros(4).double()
    for n, row in enumerate(x):
        clean, std = layer.gate @ row, F.softplus(layer.noise @ row) + 0.01
        noisy = clean + std * noise[n]
        torch.testing.assert_close(y[n], moe_row(layer, row, noisy))
        chosen = noisy.topk(2).indices
        importance[chosen] += noisy[chosen].softmax(0)
        for i in range(4):
            others = torch.cat((noisy[:i], noisy[i + 1 :]))
            load[i] += torch.distributions.Normal(0, 1).cdf((clean[i] - others.topk(2).values[-1]) / std[i])
    found = nc.peers.balance(layer)[""]
    torch.testing.assert_close(found.importance, importance.var(correction=0) / importance.mean() ** 2)
    torch.testing.assert_close(found.load, load.var(correction=0) / load.mean() ** 2)


@pytest.mark.parametrize("name", ["gate", "noise"])
def test_the_load_loss_has_its_gradient(name):
    torch.manual_seed(0)
    layer = shake(MixtureOfExperts(6, 5, experts=4, top_k=2, dtype=torch.float64))
    x, parameter = torch.randn(7, 6).double(), getattr(layer, name)

    def load():
        torch.manual_seed(5)
        layer(x)
        return nc.peers.balance(layer)[""].load

    load().backward()
    for place in ((0, 0), (2, 3), (3, 5)):
        values = []
        for move in (1e-6, -2e-6, 1e-6):
            with torch.no_grad():
                parameter[place] += move
            values.append(load().item())
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(parameter.grad[place].item(), rel=1e-4, abs=1e-8)


def test_noise_that_vanishes_leaves_gradients_finite():
    layer = MixtureOfExperts(4, 3, experts=3)
    nn.init.normal_(layer.gate)
    nn.init.constant_(layer.noise, -50)
    layer(torch.ones(8, 4) + 0.01 * torch.randn(8, 4))
    nc.peers.balance(layer)[""].load.backward()
    assert layer.gate.grad.isfinite().all()
    assert layer.noise.grad.isfinite().all()


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


def test_all_experts_chosen_are_all_loaded():
    layer = MixtureOfExperts(4, 3, experts=2, top_k=2).eval()
    nn.init.constant_(layer.gate[0], 0.01)
    report = nc.diagnose(layer, torch.rand(8, 4))[""]
    assert report.load.tolist() == [0.5, 0.5]
    assert report.dead == 0


def test_balance_evens_the_load():
    torch.manual_seed(0)
    layer = MixtureOfExperts(6, 5, experts=4, top_k=1)
    with torch.no_grad():
        layer.gate[0] += 1
    x = torch.rand(256, 6)
    assert nc.diagnose(layer, x)[""].dead == 3
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
    for _ in range(200):
        optimiser.zero_grad()
        layer(x)
        nc.peers.balance(layer)[""].load.backward()
        optimiser.step()
    layer(x)
    assert nc.peers.balance(layer)[""].load < 0.05


def test_balance_without_a_forward_says_so_and_copies_have_had_none():
    layer = MixtureOfExperts(6, 5, experts=4)
    with pytest.raises(ValueError, match="no forward in training mode since"):
        nc.peers.balance(layer)
    for rows in (3, 0, 2):  # an empty batch leaves nothing of the one before it
        layer(torch.randn(rows, 6))
        losses = nc.peers.balance(layer)[""]
        (losses.load + losses.importance).backward()
        with pytest.raises(ValueError, match="since the last time"):
            nc.peers.balance(layer)
    layer(torch.randn(3, 6))
    assert copy.deepcopy(layer)._last is None
    assert nc.peers.balance(nn.Linear(2, 2)) == {}


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
    with pytest.raises(TypeError, match="does not compose one"):
        nc.recode(network(), "0", layer=layer, base="frozen", **options)


def test_a_diagnosis_of_a_mixture_solved_by_hand():
    """Inputs e_0, e_0, e_1 with gates that read them: expert 0 twice, expert 1 once, experts 2 and 3 dead."""
    layer = MixtureOfExperts(2, 3, experts=4).eval()
    with torch.no_grad():
        layer.gate[:2] = torch.eye(2)
    report = nc.diagnose(layer, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))[""]
    torch.testing.assert_close(report.importance, torch.tensor([2 / 3, 1 / 3, 0, 0]))
    torch.testing.assert_close(report.load, report.importance)
    assert report.dead == 2
    assert report.entropy_input == 0
    assert report.entropy_batch == pytest.approx(0.6365, abs=1e-4)
    assert report.load_imbalance == pytest.approx(1.1055, abs=1e-4)  # sqrt(mean([2/3,1/3,0,0]^2) * 16 - 1)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_compile(kind, mode):
    torch._dynamo.reset()
    layer = make(kind).train(mode == "train" and "moe" not in kind)  # compiled noise has a stream of its own
    x = torch.randn(8, 6).double()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))


def test_a_compiled_mixture_trains():
    torch._dynamo.reset()
    layer = MixtureOfExperts(6, 5, experts=4, top_k=2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(8, 6)).sum().backward()
    nc.peers.balance(compiled)[""].load.item()
    assert all(expert.weight.grad is not None for expert in layer.experts)


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
