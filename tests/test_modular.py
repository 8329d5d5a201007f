"""Modular layers: against plain loops, with their gradients, and with bad input."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder import modular
from neurocoder.modular.route import Given, NoisyMixture, Sampled, routed
from tests.strategies import shake

pytestmark = pytest.mark.filterwarnings("ignore:a modular layer runs in training mode")


def linear(**options) -> modular.Linear:
    torch.manual_seed(0)
    return shake(modular.Linear(6, 4, **{"modules": 5, "choices": 2, "dtype": torch.float64} | options))


def conv(**options) -> modular.Conv2d:
    torch.manual_seed(0)
    options = {"modules": 3, "choices": 2, "dtype": torch.float64} | options
    return shake(modular.Conv2d(2, 4, 3, stride=2, padding=1, **options))


def reference(layer, x, weights=None):
    """Eq. 1 for one input at a time: the most likely modules, or the given weights (N, K, M) of all of them."""
    outputs = []
    for n, row in enumerate(x):
        logits = layer.controller(row[None] if row.dim() > 1 else row).view(layer.choices, len(layer.pool))
        made = []
        for choice in range(layer.choices):
            share = torch.zeros(len(layer.pool)).double()
            share[logits[choice].argmax()] = 1
            share = share if weights is None else weights[n, choice]
            parts = [module(row) for module in layer.pool]
            parts = [part.relu() if layer.activation else part for part in parts]
            made.append(sum(s * part for s, part in zip(share, parts, strict=True) if s != 0))
        outputs.append(sum(made) if layer.combine == "sum" else torch.cat(made))
    return torch.stack(outputs)


OPTIONS = [
    {},
    {"combine": "concatenate"},
    {"activation": "relu", "bias": False},
    {"choices": 1},
    {"dispatch": "dense"},
    {"combine": "concatenate", "activation": "relu", "dispatch": "dense"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["linear", "conv", "conv, linear controller"])
def test_a_layer_is_its_equation(kind, options):
    if kind == "linear":
        layer, x = linear(**options), torch.randn(9, 6).double()
    else:
        controller = {"controller": "linear", "input_size": (5, 6)} if "controller" in kind else {}
        layer, x = conv(**options, **controller), torch.randn(9, 2, 5, 6).double()
    x.requires_grad_()
    y = layer(x)
    wanted = reference(layer, x)
    torch.testing.assert_close(y, wanted)
    parameters = [x, *layer.pool.parameters()]
    d_y = torch.randn_like(y)
    found, wanted = (torch.autograd.grad((o * d_y).sum(), parameters, allow_unused=True) for o in (y, wanted))
    for a, b in zip(found, wanted, strict=True):
        a, b = (torch.zeros(()).double() if g is None else g for g in (a, b))
        assert (a - b).abs().max() < 1e-9
    shake(layer)
    assert not torch.allclose(layer(x), y)


def test_gradients_reach_only_chosen_modules_and_a_path_trains_the_controller():
    layer = linear(choices=1)
    x = torch.randn(3, 6).double()
    with routed(layer, Given(torch.tensor([[1], [1], [3]]))) as route:
        (layer(x).sum() + route.log_prob.sum()).backward()
    assert [module.weight.grad is not None for module in layer.pool] == [False, True, False, True, False]
    p = layer.controller(x).softmax(-1)
    torch.testing.assert_close(route.log_prob, p[[0, 1, 2], [1, 1, 3]].log())
    assert layer.controller.weight.grad.abs().sum() > 0


def test_a_mixture_weighs_the_best_noisy_modules():
    layer = linear()
    x = torch.randn(9, 6).double()
    torch.manual_seed(1)
    with routed(layer, NoisyMixture(3, noise=0.7)):
        y = layer(x)
    torch.manual_seed(1)
    logits = layer.controller(x).view(9, 2, 5).log_softmax(-1)
    noisy = logits + 0.7 * torch.randn_like(logits)
    weights = torch.zeros_like(noisy)
    for n in range(9):
        for choice in range(2):
            best = noisy[n, choice].topk(3).indices
            weights[n, choice, best] = noisy[n, choice, best].softmax(0)
    torch.testing.assert_close(y, reference(layer, x, weights))


def test_samples_follow_the_controller():
    layer = linear(choices=1)
    x = torch.randn(1, 6).double().expand(20_000, 6)
    torch.manual_seed(0)
    with torch.no_grad(), routed(layer, Sampled()) as route:
        layer(x)
    share = torch.bincount(route.choices.flatten(), minlength=5) / len(x)
    p = layer.controller(x[0]).softmax(-1)
    assert (share - p).abs().max() < 0.015  # four standard deviations of a share of 20,000 draws


def test_pools_can_be_shared(tmp_path):
    first = linear()
    second = modular.Linear(6, 4, modules=5, choices=2, pool=first.pool, dtype=torch.float64)
    assert second.pool is first.pool
    model = nn.ModuleList([first, second])
    once = sum(p.numel() for p in model.parameters())
    assert once == sum(p.numel() for p in first.parameters()) + sum(p.numel() for p in second.controller.parameters())
    plain = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    nc.recode(plain, "0", layer=modular.Linear, modules=3)
    nc.recode(plain, "2", layer=modular.Linear, modules=3, pool=plain[0].pool)
    nc.save(plain, tmp_path / "m.safetensors")
    again = nc.load(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), tmp_path / "m.safetensors")
    assert again[0].pool is again[2].pool
    x = torch.randn(4, 6)
    assert torch.equal(again(x), plain(x))
    for pool, message in ((first.pool[:2], "2 modules, not 5"), (nn.ModuleList([nn.Linear(6, 3)] * 5), "needs Linear")):
        with pytest.raises(ValueError, match=message):
            modular.Linear(6, 4, modules=5, choices=2, pool=pool)
    with pytest.raises(TypeError, match=r"nn\.ModuleList; got list"):
        modular.Linear(6, 4, modules=5, pool=[nn.Linear(6, 4)])


def test_recode_trace_diagnose_a_convolutional_network(tmp_path):
    def network():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))

    model = network()
    names = nc.recode(model, "*", layer=modular.Linear, modules=4, choices=2, combine="concatenate")
    assert names == ["0", "3"]
    assert isinstance(model[0], modular.Conv2d)
    x = torch.randn(5, 3, 8, 8)
    with nc.trace(model) as seen:
        y = model(x)
    assert seen["0"].probability.shape == (5, 2, 4)
    assert seen["3"].chosen.shape == (5, 2, 1)
    report = nc.diagnose(model, x)["3"]
    assert report.load.sum() == pytest.approx(1)
    assert 0 < report.entropy_input <= report.entropy_batch <= report.entropy_limit + 1e-6
    assert report.entropy_limit == pytest.approx(2 * 1.3863, abs=1e-3)
    assert nc.modular.training.entropies(seen) == pytest.approx(
        [
            sum(getattr(d, name) for d in nc.diagnose(model, x).values()) / 2
            for name in ("entropy_input", "entropy_batch")
        ]
    )
    nc.save(model, tmp_path / "m.safetensors")
    assert torch.equal(nc.load(network(), tmp_path / "m.safetensors")(x), y)


def test_entropies_solved_by_hand():
    """Two inputs, two choices of two modules: sure of (0, 0) and of (1, 1). H_a = 0; H_b = log 2, not 2 log 2."""
    layer = modular.Linear(1, 1, modules=2, choices=2)
    with torch.no_grad():
        layer.controller.weight.copy_(torch.tensor([[500.0], [-500.0]] * 2))
        layer.controller.bias.zero_()
    with nc.trace(layer) as seen:
        layer(torch.tensor([[1.0], [-1.0]]))
    h_a, h_b = modular.training.entropies(seen)
    assert h_a == pytest.approx(0)
    assert h_b == pytest.approx(0.6931, abs=1e-4)
    with pytest.raises(ValueError, match="no modular layer was called"):
        modular.training.entropies(seen.__class__({}))


def test_so_many_compositions_that_they_are_not_counted():
    p = torch.full((3, 9, 4), 0.25)
    assert nc.diagnosis.selection_entropy(p) == pytest.approx((9 * 1.3863, 9 * 1.3863), abs=1e-3)


def gru_reference(gru, x_BTI):
    """Appendix A, one sequence and one step at a time."""
    outputs = []
    for sequence in x_BTI:
        h, states = torch.zeros(gru.hidden_size).double(), []
        for x in sequence:
            z, r = gru.gates(torch.cat((h, x))).sigmoid().chunk(2)
            inside = torch.cat((r * h, x))
            if isinstance(gru.candidate, nn.Linear):  # all modules, and nothing to choose
                made, activation = gru.candidate(inside).split(gru.hidden_size), gru.activation
            else:
                logits = gru.candidate.controller(torch.cat((h, x))).view(gru.candidate.choices, -1)
                made = [gru.candidate.pool[int(choice.argmax())](inside) for choice in logits]
                activation = gru.candidate.activation
            candidate = F.relu(sum(part.relu() if activation else part for part in made))
            h = (1 - z) * h + z * candidate
            states.append(h)
        outputs.append(torch.stack(states))
    return torch.stack(outputs)


@pytest.mark.parametrize("dispatch", ["sparse", "dense"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("choices", [1, 3, None])
def test_the_gru_is_appendix_a(choices, activation, dispatch):
    torch.manual_seed(0)
    options = {"modules": 5, "choices": choices, "activation": activation, "dispatch": dispatch}
    gru = shake(modular.GRU(3, 4, batch_first=True, dtype=torch.float64, **options))
    x = torch.randn(6, 7, 3).double().requires_grad_()
    with nc.trace(gru) as seen:
        y, last = gru(x)
    assert choices is None or len(seen.calls("candidate")) == 7
    wanted = gru_reference(gru, x)
    torch.testing.assert_close(y, wanted)
    learned = [x, *(p for name, p in gru.named_parameters() if "controller" not in name)]
    d_y = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(output, learned, d_y, allow_unused=True) for output in (y, wanted))
    for a, b in zip(found, wanted, strict=True):
        a, b = (torch.zeros(()).double() if g is None else g for g in (a, b))  # of modules that nothing chose
        assert (a - b).abs().max() < 1e-9
    assert torch.equal(last[0], y[:, -1])
    gru.batch_first = False
    torch.testing.assert_close(gru(x.transpose(0, 1))[0].transpose(0, 1), y)
    _, half = gru(x.transpose(0, 1)[:3])
    torch.testing.assert_close(gru(x.transpose(0, 1)[3:], half)[1], last)
    parameters = sum(p.numel() for p in gru.parameters())
    assert parameters == 8 * 7 + 8 + 5 * (4 * 7 + 4) + (choices or 0) * 5 * 8
    shake(gru)
    assert not torch.allclose(gru(x.transpose(0, 1))[0].transpose(0, 1), y)


@pytest.mark.parametrize(
    "window", [{"groups": 2}, {"padding_mode": "reflect"}, {"dilation": 2}, {"padding": "same", "stride": 1}], ids=str
)
def test_dense_dispatch_is_sparse_dispatch_whatever_the_kernels_are(window):
    torch.manual_seed(0)
    window = {"stride": 2, "padding": 1} | window
    layers = [
        modular.Conv2d(2, 4, 3, modules=3, dispatch=d, dtype=torch.float64, **window) for d in ("sparse", "dense")
    ]
    layers[1].load_state_dict(shake(layers[0]).state_dict())
    x = torch.randn(9, 2, 6, 6).double()
    torch.testing.assert_close(layers[0](x), layers[1](x))


def test_modules_of_another_kind_are_called_one_by_one():
    torch.manual_seed(0)
    gru = modular.GRU(3, 4, modules=2, dispatch="dense")
    x = torch.randn(5, 6, 3)
    before = gru(x)[0]
    for n, module in enumerate(gru.candidate.pool):
        gru.candidate.pool[n] = nn.Sequential(module)
    torch.testing.assert_close(gru(x)[0], before)


@pytest.mark.parametrize("choices", [1, 2])
def test_both_ways_of_a_gru_train_alike(choices):
    """Along a path, which trains the controller, and mixing modules: values and gradients."""
    torch.manual_seed(0)
    sparse = shake(modular.GRU(3, 4, modules=5, choices=choices, dtype=torch.float64))
    dense = modular.GRU(3, 4, modules=5, choices=choices, dispatch="dense", dtype=torch.float64)
    dense.load_state_dict(sparse.state_dict())
    x, path = torch.randn(7, 6, 3).double(), torch.randint(5, (6, 7 * choices))
    for make in (lambda: Given(path), lambda: NoisyMixture(3, 0.0)):
        gradients = []
        for gru in (sparse, dense):
            gru.zero_grad()
            with routed(gru, make()) as route:
                output = gru(x)[0].square().sum()
            (output if route.log_prob is None else output + route.log_prob.sum()).backward()
            gradients.append({name: p.grad for name, p in gru.named_parameters()})
        for name, gradient in gradients[1].items():
            known = gradients[0][name]
            torch.testing.assert_close(gradient, torch.zeros_like(gradient) if known is None else known)


def test_two_grus_can_share_a_pool():
    first = modular.GRU(3, 4, modules=5)
    second = modular.GRU(3, 4, modules=5, pool=first.candidate.pool)
    assert second.candidate.pool is first.candidate.pool


@pytest.mark.slow
@pytest.mark.parametrize("make", [linear, conv])
def test_compile_export_meta_and_empty(make):
    torch._dynamo.reset()
    layer = make()
    x = torch.randn(8, 6).double() if make is linear else torch.randn(8, 2, 5, 6).double()
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    torch.export.export(layer, (x,))
    empty = layer(x[:0])
    assert empty.shape == (0, *layer(x).shape[1:])
    empty.sum().backward()
    assert layer.to("meta")(x.to("meta")).shape[0] == 8


def test_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grus = [
            modular.GRU(6, 4, modules=3, batch_first=True, **more)
            for more in ({}, {"dispatch": "dense"}, {"choices": None})
        ]
        for layer in (modular.Linear(6, 4, modules=3), *grus):
            y = layer(torch.randn(2, 5, 6))
            assert (y[0] if isinstance(y, tuple) else y).isfinite().all()
        assert modular.Conv2d(2, 4, 3, modules=3)(torch.randn(3, 2, 5, 5)).dtype == torch.bfloat16


def test_a_layer_says_once_that_an_ordinary_loss_never_trains_its_controller():
    torch._dynamo.reset()
    x = torch.randn(4, 6)
    for layer in (modular.Linear(6, 4, modules=3), modular.GRU(6, 4, modules=3).candidate):
        looked_at = (x,) if layer.in_features == 6 else (torch.randn(4, 10), torch.randn(4, 10))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.no_grad():
                layer(*looked_at)
            with nc.trace(layer):
                layer(*looked_at)
            with routed(layer, Sampled()):
                layer(*looked_at)
            layer.eval()(*looked_at)
            torch.compile(layer.train(), fullgraph=True, backend="aot_eager")(*looked_at)
        with pytest.warns(UserWarning, match="without one of its trainings.*never the controller"):
            layer(*looked_at).sum().backward()
        assert all(p.grad is None for p in layer.controller.parameters())  # as the warning says
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(*looked_at)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        modular.Linear(6, 4, modules=1)(x)
        layer = modular.Linear(6, 4, modules=3)
        layer.controller.requires_grad_(False)
        layer(x.requires_grad_())


def test_modules_of_a_pool_are_left_alone_whatever_their_name():
    layer = modular.Linear(6, 6, modules=3)
    model = nn.ModuleDict({"pool": layer.pool, "layer": layer, "last": nn.Linear(6, 2)})
    assert nc.recode(model, "*", slots=3) == ["last"]


def test_leading_shapes_control_and_single_images():
    layer = linear(control_features=3)
    x, control = torch.randn(2, 3, 6).double(), torch.randn(2, 3, 3).double()
    torch.testing.assert_close(layer(x, control=control)[1, 2], layer(x[1, 2], control=control[1, 2]))
    images = torch.randn(4, 2, 5, 6).double()
    torch.testing.assert_close(conv()(images[0]), conv()(images)[0])
    torch.testing.assert_close(layer(x, control[:, 0])[1, 2], layer(x[1, 2], control[1, 0]))  # one choice a sequence
    guided, task = conv(control_features=3), torch.randn(4, 3).double()
    torch.testing.assert_close(guided(images, task)[2], guided(images[2], task[2]))
    assert not torch.allclose(guided(images, task), guided(images, -task))
    with pytest.raises(ValueError, match="call it with control="):
        layer(x)
    with pytest.raises(ValueError, match="must begin that of x"):
        layer(x, control=control[0])
    with pytest.raises(ValueError, match=r"expects control of shape \(\.\.\., 6\), got \(2, 3, 3\)"):
        linear()(x, control=control)
    with pytest.raises(ValueError, match="give one row each"):
        guided(images, task[:2])
    with pytest.raises(ValueError, match="built without control_features"):
        conv()(images, task)
    with pytest.raises(ValueError, match="needs no input_size"):
        conv(control_features=3, controller="linear", input_size=(5, 6))


BAD = [
    ({"modules": 2, "choices": 3}, "choices is at most the number of modules, 2; got 3"),
    ({"modules": 0}, "modules must be"),
    ({"modules": 4, "combine": "mean"}, "'sum' or 'concatenate', got 'mean'"),
    ({"modules": 4, "choices": 3, "combine": "concatenate"}, "3 modules cannot share 4 outputs"),
    ({"modules": 4, "activation": "tanh"}, "None or 'relu', got 'tanh'"),
    ({"modules": 4, "dispatch": "quick"}, "'sparse' or 'dense', got 'quick'"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        modular.Linear(6, 4, **options)
    model = nn.Sequential(nn.Linear(6, 4), nn.Flatten())
    with pytest.raises(ValueError, match=message):
        nc.recode(model, "0", layer=modular.Linear, **options)
    assert type(model[0]) is nn.Linear


def test_bad_input():
    with pytest.raises(ValueError, match=r"nc\.modular\.Linear expects x of shape \(\.\.\., 6\)"):
        linear()(torch.randn(2, 5).double())
    with pytest.raises(ValueError, match="needs input_size"):
        modular.Conv2d(2, 4, 3, modules=2, controller="linear")
    with pytest.raises(ValueError, match="'convolution' or 'linear', got 'mlp'"):
        modular.Conv2d(2, 4, 3, modules=2, controller="mlp")
    with pytest.raises(ValueError, match=r"built for images of \(5, 6\), got \(6, 6\)"):
        conv(controller="linear", input_size=(5, 6))(torch.randn(1, 2, 6, 6).double())
    with pytest.raises(ValueError, match="leave pool out"):
        modular.GRU(3, 4, modules=2, choices=None, pool=nn.ModuleList())
    for choices in (1, None):
        with pytest.raises(ValueError, match="activation must be None or 'relu', got 'tanh'"):
            modular.GRU(3, 4, modules=2, choices=choices, activation="tanh")
        with pytest.raises(ValueError, match="dispatch must be 'sparse' or 'dense', got 'foo'"):
            modular.GRU(3, 4, modules=2, choices=choices, dispatch="foo")
    gru = modular.GRU(3, 4, modules=2)
    with pytest.raises(ValueError, match=r"expected x of shape \(steps, batch, 3\)"):
        gru(torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"expected h_0 of shape \(1, 2, 4\)"):
        gru(torch.randn(5, 2, 3), torch.zeros(2, 4))
    with pytest.raises(TypeError, match="got list"):
        gru([1.0])
    with pytest.raises(TypeError, match="convert one of them"):
        gru(torch.randn(5, 2, 3).double())
    with pytest.raises(ValueError, match="at least one step"):
        gru(torch.randn(0, 2, 3))
