"""Re-coding with no other word, sizes that match, and the table of them."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.sizing import count
from neurocoder.walk import conditional_layers


class Block(nn.Module):
    """Half a residual network, half a mobile one: plain, depthwise, grouped and 1 x 1 convolutions, without biases."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.deep = nn.Conv2d(16, 64, 3, padding="same", padding_mode="reflect", dilation=2)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False)
        self.point = nn.Conv2d(64, 64, 1, bias=False)
        self.grouped = nn.Conv2d(64, 64, 3, padding=1, groups=8)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.deep(self.stem(x).relu())
        x = x + self.point(self.depthwise(x).relu())
        return self.head(self.grouped(x).relu().mean((2, 3)))


class Language(nn.Module):
    """An embedding, a transformer, a head over the vocabulary, and one that says one number."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(500, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.vocabulary, self.value = nn.Linear(32, 500), nn.Linear(32, 1)

    def forward(self, x):
        x = self.layer(self.embed(x))
        return torch.cat((self.vocabulary(x), self.value(x)), -1)


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)), torch.randn(6, 128)),
    "convolutions": (Block, torch.randn(3, 3, 12, 12)),
    "language": (Language, torch.arange(30).view(3, 10)),
}


@pytest.fixture(params=NETWORKS)
def network(request) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    build, x = NETWORKS[request.param]
    return build(), x


def quietly(model: nn.Module, **options) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attention's projection, which is left out
        return nc.recode(model, "*", **options)


@pytest.mark.parametrize("trained", [False, True])
def test_with_no_other_word_a_network_starts_as_itself_and_keeps_its_size(network, trained):
    model, x = network
    if trained:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(torch.linspace(0.5, 2, p.numel()).view_as(p))
    wanted, before = model(x), {name: count(m) for name, m in model.named_modules()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        names = nc.recode(model, "*")
    assert not any("trained" in str(one.message) for one in told)
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    assert count(model) <= 1.15 * before[""]
    assert names == [name for name, _ in conditional_layers(model)]
    for name, layer in conditional_layers(model):
        assert layer.slots >= 8 or before[name] < 10_000 or before[""] < 20_000
    (model(x) - torch.randn_like(wanted)).square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.any() or "self_attn" in name, name


def test_what_is_composed_depends_on_the_input_after_one_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128))
    nc.recode(model, "*")
    x = torch.randn(6, 128)
    programs = model[0].program(x)
    torch.testing.assert_close(programs[0], programs[1])
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    (model(x) - torch.randn(6, 128)).square().mean().backward()
    optimiser.step()
    programs = model[0].program(x)
    assert (programs[0] - programs[1]).norm() > 1e-3 * programs[0].norm()


def test_a_weight_of_zeros_still_learns_programs():
    model = nn.Sequential(nn.Linear(128, 128))
    nn.init.zeros_(model[0].weight)
    nc.recode(model, "*")
    torch.testing.assert_close(model(torch.randn(3, 128)), model[0].bias.expand(3, -1), rtol=0, atol=1e-5)
    assert model[0].gain > 0


def test_a_frozen_base_needs_no_other_word(network):
    model, x = network
    wanted, before = model(x), count(model)
    quietly(model, base="frozen")
    assert torch.equal(model(x), wanted)
    assert count(model) <= 1.15 * before


def test_chosen_sizes_are_saved(network, tmp_path):
    model, x = network
    fresh = copy.deepcopy(model)
    quietly(model)
    nc.save(model, tmp_path / "m.safetensors")
    nc.load(fresh, tmp_path / "m.safetensors")
    assert torch.equal(fresh(x), model(x))
    nc.load(model, tmp_path / "m.safetensors")  # and into one that is re-coded already


def test_options_beside_chosen_slots():
    model = nn.Sequential(nn.Linear(512, 512))
    nc.recode(model, "*", heads=3, steps=2, least_used=1)
    assert (model[0].heads, model[0].steps, model[0].residual is not None) == (3, 2, True)
    nc.recode(many := nn.Sequential(nn.Linear(512, 512)), "*", heads=1, steps=2, least_used=10)
    assert many[0].slots >= 10
    afresh = nn.Sequential(nn.Linear(128, 128))
    nc.recode(afresh, "*", residual=False)  # nothing holds the old weight: as large as it was
    assert abs(count(afresh) / count(nn.Linear(128, 128)) - 1) < 0.05
    with pytest.raises(ValueError, match="too small to choose slots by itself: with 20 parameters"):
        nc.recode(nn.Sequential(nn.Linear(4, 4)), "*")


def test_a_wildcard_leaves_out_what_cannot_be_replaced_and_says_why():
    model = Language()
    with pytest.warns(UserWarning, match=r"left these layers as they were: layer.self_attn.out_proj: .* never run"):
        assert nc.recode(model, "*", slots=2) == ["layer.linear1", "layer.linear2", "vocabulary", "value"]
    with pytest.raises(TypeError, match="reads its weight"):
        nc.recode(Language(), ["*", "layer.self_attn.out_proj"], slots=2)


def test_a_layer_too_small_for_the_network_is_left_and_named():
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 1))
    with pytest.warns(UserWarning, match="1: too small"):
        assert nc.recode(model, "*") == ["0"]


KINDS = [
    (nc.Linear, {"heads": 2}),
    (nc.peers.MixtureOfExperts, {"top_k": 2}),
    (nc.peers.StoredProgramMemory, {}),
    (nc.peers.HyperLinear, {}),
    (nc.peers.FiLM, {}),
    (nc.peers.LowRank, {}),
    (nc.modular.Linear, {"choices": 2}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_one_call_gives_every_peer_the_same_size(kind, options):
    model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 10))
    nc.recode(model, "*", layer=kind, parameters=20_000, **options)
    assert abs(count(model) / 20_000 - 1) < 0.05
    option = kind.size
    for step in (-1, 1):  # no other size comes nearer
        other = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 10))
        given = model[0].options()[option] + step
        more = {"layers": 2} if option == "hidden" else {}
        nc.recode(other, "*", layer=kind, **options | more | {option: given})
        assert abs(count(other) - 20_000) >= abs(count(model) - 20_000)


def test_sizes_that_cannot_be():
    model = nn.Sequential(nn.Linear(20, 30))
    with pytest.raises(ValueError, match=r"with experts=2 the network has 1,340 parameters, not 700; plain it has 630"):
        nc.recode(model, "*", layer=nc.peers.MixtureOfExperts, parameters=700, top_k=2)
    with pytest.raises(TypeError, match="parameters chooses slots: give one of them"):
        nc.recode(model, "*", slots=3, parameters=700)
    with pytest.raises(TypeError, match="whole number"):
        nc.recode(model, "*", parameters=1e6)
    with pytest.raises(ValueError, match=r"with slots=100 the network has .* parameters, not 700"):
        nc.recode(model, "*", parameters=700, top_k=100)
    with pytest.warns(UserWarning, match=r"nearest to 1,000 parameters is experts=1 with 670, -33%"):
        nc.recode(model, "*", layer=nc.peers.MixtureOfExperts, parameters=1000)


def test_the_table_of_sizes():
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False))
    nc.recode(model, "0", slots=4)
    nc.recode(model, "2", slots=2)
    nc.recode(model, "3", slots=2, memory=model[2].memory)
    found = nc.sizes(model)
    assert found.total.parameters == count(model)
    assert [row.plain for row in found] == [35, 10, 30, 25]
    assert found.total.ratio == count(model) / 100
    assert str(found).splitlines()[0].split() == ["name", "kind", "parameters", "plain", "ratio"]
    assert str(found).splitlines()[-1].startswith("total")
    assert nc.sizes(nc.Linear(6, 5, bias=False, slots=4))[0].plain == 30
    assert nc.sizes(nc.modular.Conv2d(2, 4, 3, modules=3))[0].plain == 76
    with pytest.raises(TypeError, match=r"sizes takes an nn\.Module"):
        nc.sizes("model")


def test_a_memory_knows_its_slots():
    first = nc.Linear(6, 5, slots=3)
    assert nc.Linear(6, 5, memory=first.memory).slots == 3
    model, left = nn.Sequential(nn.Linear(6, 5)), first.memory.left.detach().clone()
    nc.recode(model, "0", memory=first.memory, residual=True)
    assert model[0].memory is first.memory
    assert torch.equal(first.memory.left, left)  # somebody else's: not made the old layer's
    with pytest.raises(TypeError, match="give slots="):
        nc.Linear(6, 5)


def test_recoding_twice_says_so():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5))
    nc.recode(model, "0", slots=3)
    with pytest.raises(ValueError, match=r"'0' matches only what is re-coded already \(0\); .* replaced: 1"):
        nc.recode(model, "0", slots=3)


SHAPES = [
    (4, 6, 3, {}),
    (4, 6, (3, 2), {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}),
    (4, 6, 3, {"groups": 2, "padding": "same", "bias": False}),
    (4, 8, 3, {"groups": 4, "padding": 1, "padding_mode": "circular", "stride": 2}),
]


@pytest.mark.parametrize("options", [{}, {"residual": True}, {"residual": True, "controller_sees": "read"}])
@pytest.mark.parametrize(("inputs", "outputs", "kernel", "shape"), SHAPES)
def test_a_kernel_for_each_image_gives_what_its_factors_give(inputs, outputs, kernel, shape, options):
    torch.manual_seed(0)
    layer = nc.Conv2d(inputs, outputs, kernel, **shape, slots=3, heads=2, **options, dtype=torch.float64)
    x, found = torch.randn(3, inputs, 7, 8, dtype=torch.float64, requires_grad=True), []
    for whole in (False, True):
        layer._whole = whole
        layer.zero_grad()
        y = layer(x)
        (gradient,) = torch.autograd.grad(y.cos().sum(), x, retain_graph=True)
        y.sin().sum().backward()
        found.append([y.detach(), gradient, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert layer(x[:0].detach()).shape[0] == 0
    read = F.conv2d(x, torch.ones(1, inputs, 3, 3, dtype=x.dtype), stride=2).mean((1, 2, 3))
    patch = nc.functional.average_patch(x, (3, 3), (2, 2), (1, 1))
    torch.testing.assert_close(patch.sum((1, 2, 3)), read)


def test_kernels_for_each_image_under_vmap():
    torch.manual_seed(0)
    layer = nc.Conv2d(3, 4, 3, slots=2, residual=True, dtype=torch.float64)
    x, parameters = torch.randn(3, 3, 5, 5, dtype=torch.float64), dict(layer.named_parameters())
    buffers = dict(layer.named_buffers())

    def loss(parameters, image):
        return torch.func.functional_call(layer, (parameters, buffers), (image[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    layer(x).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(each[name].sum(0), parameter.grad)


def test_small_kernels_are_made_whole():
    assert nc.Conv2d(64, 64, 3, groups=64, slots=4)._whole
    assert nc.Conv2d(3, 32, 3, slots=8, residual=True)._whole
    assert not nc.Conv2d(64, 64, 3, slots=8)._whole
    assert not nc.Conv2d(256, 256, 3, slots=8, residual=True)._whole
