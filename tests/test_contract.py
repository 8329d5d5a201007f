"""The contract of conditional layers: a layer from outside the library, end to end, and what serves all layers."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.func import functional_call, vmap

import neurocoder as nc
from neurocoder.conditional import KINDS
from neurocoder.peers import FiLM, HyperLinear, LowRank, MixtureOfExperts, StoredProgramMemory
from tests.strategies import shake


@dataclass(frozen=True, repr=False)
class Gains(nc.Record):
    """What a layer from outside records."""

    gain: torch.Tensor

    def use(self):
        return self.gain


@nc.register
class Gained(nc.Conditional):
    """y = sum_g sigmoid(c V)_g x_g W_g: each group of inputs is heard as loudly as a control says."""

    wants = {"sparsity": 0.5}  # noqa: RUF012

    def __init__(
        self, in_features, out_features, bias=True, *, groups=2, control_features=None, device=None, dtype=None
    ):
        super().__init__()
        self.in_features, self.out_features, self.groups = in_features, out_features, groups
        width = self.look_at(control_features, in_features)
        self.linear = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.gate = nn.Linear(width, groups, device=device, dtype=dtype)
        self._gains = None

    def options(self):
        return {"groups": self.groups, **self.control_option()}

    def auxiliary(self):
        gains, self._gains = self._gains, None
        return {} if gains is None else {"sparsity": gains.mean()}

    def forward(self, x, control=None):
        lead, x_YI, control_NC = self.arrange(x, control)
        gain_NG = self.gate(control_NC).sigmoid()
        self._gains = gain_NG if self.training else None
        if self.watched:
            self.record(Gains(gain_NG.reshape(*lead, self.groups)))
        gain_YI = self.spread(gain_NG, x_YI).repeat_interleave(self.in_features // self.groups, 1)
        return self.linear(x_YI * gain_YI).reshape(*x.shape[:-1], self.out_features)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_layer_from_outside_end_to_end(tmp_path):
    model, x, labels = network(), torch.randn(10, 6), torch.arange(10) % 3
    assert nc.recode(model, "*", layer=Gained, groups=2) == ["0", "2"]
    loss = model(x).square().sum() + nc.auxiliary(model)
    loss.backward()
    assert all(p.grad.any() for p in model.parameters())
    model.zero_grad()
    model(x)
    nc.auxiliary(model, sparsity=2.0).backward()
    assert model[0].gate.weight.grad.any()
    assert model[2].linear.weight.grad is None  # nothing but what it wants

    with nc.trace(model) as seen:
        model(x)
    assert repr(seen["0"]) == "Gains(gain (10, 2))"
    report = nc.diagnose(model, x, by=labels)
    gain = seen["0"].gain
    share = gain / gain.sum(1, keepdim=True)
    torch.testing.assert_close(report["0"].usage, share.mean(0).detach())
    torch.testing.assert_close(report.by[1]["0"].usage, share[labels == 1].mean(0).detach())
    assert report["0"].entropy == pytest.approx(-(share * share.log()).sum(1).mean().item())
    assert report["0"].dead == []
    assert "tests.test_contract.Gained" in str(report)

    nc.save(model, tmp_path / "m.safetensors")
    again = nc.load(network(), tmp_path / "m.safetensors")
    assert type(again[0]) is Gained
    assert torch.equal(again(x), model(x))


def test_a_file_names_no_class_that_is_not_registered(tmp_path):
    name = f"{Gained.__module__}.Gained"
    model = network()
    nc.recode(model, "0", layer=Gained)
    nc.save(model, tmp_path / "m.safetensors")
    kind = KINDS.pop(name)
    try:
        with pytest.raises(ValueError, match=rf"unknown layer '{name}' in the recipe; .* import that first"):
            nc.load(network(), tmp_path / "m.safetensors")
        with pytest.raises(TypeError, match=r"put @nc\.register above its class"):
            nc.save(model, tmp_path / "other")
    finally:
        nc.register(kind)
    assert KINDS[name] is Gained


def test_what_cannot_be_registered():
    with pytest.raises(TypeError, match=r"register takes a subclass of nc\.Conditional"):
        nc.register(nn.Linear)
    with pytest.raises(ValueError, match=r"'peers\.FiLM' is taken by neurocoder\.peers\.film\.FiLM"):
        nc.register("peers.FiLM")(Gained)

    class Silent(nc.Conditional):
        def __init__(self, in_features, out_features, bias, device, dtype):
            super().__init__()

    with pytest.raises(TypeError, match=r"Silent must define options\(\)"):
        nc.register(Silent)

    with pytest.raises(TypeError, match=r"Odd\.replaces must be nn\.Linear or nn\.Conv2d, got .*GRU"):

        class Odd(Gained):
            replaces = nn.GRU

    class Narrow(Gained):
        def __init__(self, in_features, out_features, bias=True):
            super().__init__(in_features, out_features, bias)

    with pytest.raises(TypeError, match="the constructor of Narrow must take device, dtype"):
        nc.register(Narrow)
    with pytest.raises(TypeError, match="needs a layer that can start as the one it replaces"):
        nc.recode(network(), "0", layer=Gained, base="frozen")


# ---- what serves all layers

LAYERS = {
    "program": (nc.Linear, {"slots": 4, "heads": 2}),
    "several steps": (nc.Linear, {"slots": 4, "steps": 3, "least_used": 2, "residual": True}),
    "moe": (MixtureOfExperts, {"experts": 3}),
    "nsm": (StoredProgramMemory, {"programs": 3}),
    "hyper": (HyperLinear, {}),
    "film": (FiLM, {"layers": 2, "hidden": 4}),
    "modular": (nc.modular.Linear, {"modules": 3, "dispatch": "dense"}),
    "outside": (Gained, {}),
}
everyone = pytest.mark.parametrize("kind", LAYERS)


@everyone
@pytest.mark.filterwarnings("ignore:a modular layer runs in training mode")
def test_a_control_reaches_layers_deep_in_a_network(kind):
    layer, options = LAYERS[kind]
    model = network()
    nc.recode(model, "*", layer=layer, control_features=3, **options)
    shake(model).eval()
    x, control = torch.randn(5, 4, 6), torch.randn(5, 3)
    wanted = model[2](model[1](model[0](x, control=control)), control=control)
    with pytest.raises(ValueError, match=r"or inside of nc\.controlled"):
        model(x)
    with nc.controlled(model, control):
        torch.testing.assert_close(model(x), wanted)
        with nc.controlled(model, {"2": -control}):
            assert not torch.allclose(model(x), wanted)
        torch.testing.assert_close(model(x), wanted)
        assert nc.diagnose(model, x)["2"].inputs == 5
    with nc.controlled(model, {"*": -control, "0": control, "2": control}):
        torch.testing.assert_close(model(x), wanted)
    assert model[0]._control is None


@pytest.mark.slow
@everyone
def test_a_control_in_a_compiled_network(kind):
    torch._dynamo.reset()
    layer, options = LAYERS[kind]
    model = network()
    nc.recode(model, "*", layer=layer, control_features=3, **options)
    shake(model.double()).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 6).double()
    for control in (torch.randn(5, 3).double(), torch.randn(5, 3).double()):  # no value is built in
        with nc.controlled(model, control):
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.slow
@everyone
def test_a_control_under_export_autocast_and_vmap(kind):
    kind, options = LAYERS[kind]
    options = options | ({"dispatch": "dense"} if kind is MixtureOfExperts else {})
    torch.manual_seed(0)
    layer = shake(kind(6, 4, control_features=3, **options)).eval()
    x, control = torch.randn(5, 7, 6), torch.randn(5, 3)
    wanted = layer(x, control)
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(layer, (x[:3], control[:3]), dynamic_shapes=({0: batch}, {0: batch}))
    torch.testing.assert_close(exported.module()(x, control), wanted)
    torch.testing.assert_close(vmap(lambda row, c: functional_call(layer, {}, (row, c)))(x, control), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x, control).dtype == torch.bfloat16
    assert layer.to("meta")(x.to("meta"), control.to("meta")).shape == (5, 7, 4)


def test_a_control_may_be_a_parameter_and_stays_its_owners():
    model = network()
    nc.recode(model, "0", layer=FiLM, control_features=3)
    task = nn.Parameter(torch.randn(5, 3))
    shake(model)
    with nc.controlled(model, task):
        model(torch.randn(5, 6)).sum().backward()
        assert all(p is not task for p in model.parameters())
    assert task.grad.any()


def test_controls_that_nothing_looks_at():
    model, x = network(), torch.randn(5, 6)
    nc.recode(model, "0", layer=FiLM)
    with pytest.raises(ValueError, match="matches '\\*'; there is none: give recode control_features="):
        nc.controlled(model, x).__enter__()
    nc.recode(model, "2", slots=3, control_features=3)
    with pytest.raises(ValueError, match="matches 'head'; the nearest: 2"):
        nc.controlled(model, {"head": x}).__enter__()
    with pytest.raises(TypeError, match="a control is a tensor"):
        nc.controlled(model, {"2": 3}).__enter__()
    with pytest.raises(TypeError, match=r"takes an nn\.Module first"):
        nc.controlled(x, x).__enter__()
    with nc.controlled(model, x), pytest.raises(ValueError, match=r"expects control of shape \(\.\.\., 3\)"):
        model(x)


def test_auxiliary_is_the_sum_of_what_layers_want():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    nc.recode(model, "0", slots=4)
    nc.recode(model, "1", slots=4, memory=model[0].memory)  # counts once
    nc.recode(model, "2", layer=MixtureOfExperts, experts=3)
    shake(model)  # fresh memories are orthogonal
    x = torch.randn(7, 6)
    torch.manual_seed(1)
    model(x)
    balance = sum(nc.peers.balance(model)["2"])

    def auxiliary(**weights):
        torch.manual_seed(1)
        model(x)
        return nc.auxiliary(model, **weights)

    orthogonality = nc.orthogonality(model)
    assert min(orthogonality, balance) > 0.1
    torch.testing.assert_close(auxiliary(), 0.1 * orthogonality + 0.1 * balance)
    torch.testing.assert_close(auxiliary(orthogonality=2.0, balance=0), 2 * orthogonality)
    torch.testing.assert_close(auxiliary(balance=3, sparsity=5.0), 0.1 * orthogonality + 3 * balance)
    auxiliary().backward()
    assert model[2].gate.grad.any()
    assert model[0].memory.left.grad.any()


def test_auxiliary_of_what_has_nothing_to_give():
    assert nc.auxiliary(network(), orthogonality=0.1) == 0
    model = network()
    nc.recode(model, "0", layer=MixtureOfExperts, experts=3)
    with pytest.raises(ValueError, match="no balance loss: no forward in training mode since the last time: 0"):
        nc.auxiliary(model)
    assert nc.auxiliary(model, balance=0) == 0
    assert nc.auxiliary(model.eval()) == 0
    with pytest.raises(TypeError, match=r"the kind 'orthogonalty'; did you mean orthogonality\?"):
        nc.auxiliary(model, orthogonalty=0.1)
    with pytest.raises(TypeError, match=r"the kind 'zzz'; there are .*balance"):
        nc.auxiliary(model, zzz=0.1)
    for bad in (-1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="must be a number of at least 0"):
            nc.auxiliary(model, balance=bad)


@pytest.mark.slow
def test_auxiliary_inside_of_a_compiled_step():
    torch._dynamo.reset()
    model, x = network().double(), torch.randn(5, 6).double()
    nc.recode(model, "*", slots=4, heads=2)

    def loss(x):
        return model(x).square().sum() + nc.auxiliary(model)

    torch.testing.assert_close(torch.compile(loss, fullgraph=True, backend="aot_eager")(x), loss(x))


@everyone
def test_every_diagnosis_has_the_common_fields_and_prints_in_one_table(kind):
    layer, options = LAYERS[kind]
    model = network()
    nc.recode(model, "2", layer=layer, **options)
    nc.recode(model, "0", layer=LowRank, rank=3)
    shake(model)
    x, labels = torch.randn(12, 6), torch.tensor([0, 1, 1] * 4)
    report = nc.diagnose(model, x, by=labels)
    found = report["2"]
    banks = ["left", "right", "values"] if layer is nc.Linear else [""]
    assert [*found.by_bank()] == banks
    for usage, entropy, entropy_batch, dead in found.by_bank().values():
        assert usage.sum().item() == pytest.approx(1, abs=1e-5)
        assert 0 <= entropy <= entropy_batch + 1e-6 <= found.entropy_limit + 2e-6
        assert all(0 <= part < len(usage) for part in dead)
    assert [*report.by] == [0, 1]
    assert [report.by[label]["2"].inputs for label in (0, 1)] == [4, 8]
    mean = (4 * report.by[0]["2"].usage + 8 * report.by[1]["2"].usage) / 12
    torch.testing.assert_close(mean, found.usage)
    assert not torch.allclose(report.by[0]["2"].usage, found.usage)
    lines = str(report).splitlines()
    assert len(lines) == 1 + 3 + 3 * len(banks)
    assert lines[0].split()[:4] == ["layer", "class", "kind", *(["bank"] if len(banks) > 1 else ["inputs"])]
    assert "class" not in str(nc.diagnose(model, x))
    alone = nc.diagnose(model, x[labels == 1])["2"]
    torch.testing.assert_close(report.by[1]["2"].usage, alone.usage)


def test_labels_that_do_not_fit():
    model, x = network(), torch.randn(5, 6)
    nc.recode(model, "0", slots=3)
    for labels in (torch.zeros(4), torch.zeros(5, 2), torch.tensor(1)):
        with pytest.raises(ValueError, match=r"one label for each input of every layer.*'0' did"):
            nc.diagnose(model, x, by=labels)
    steps = nc.diagnose(model, torch.randn(5, 3, 6), by=[0, 0, 0, 1, 1])  # one label a sequence
    assert steps.by[1]["0"].inputs == 6


def test_calls_of_a_recurrent_layer_are_stacked_and_counted_by_class():
    torch.manual_seed(0)
    gru = nc.modular.GRU(3, 4, modules=3, batch_first=True)
    x = torch.randn(5, 7, 3)
    with nc.trace(gru) as seen:
        gru(x)
    stacked = seen.stacked("candidate")
    assert stacked.probability.shape == (7, 5, 1, 3)
    assert torch.equal(stacked.probability[2], seen.calls("candidate")[2].probability)
    report = nc.diagnose(gru, x, by=[0, 1, 1, 1, 1])
    assert (report["candidate"].inputs, report.by[1]["candidate"].inputs) == (35, 28)
    layer = nc.Linear(6, 5, slots=4)
    with nc.trace(layer) as seen:
        layer(torch.randn(2, 6))
        layer(torch.randn(3, 6))
    with pytest.raises(ValueError, match="the calls of '' differ in shape"):
        seen.stacked("")
    with nc.trace(layer) as seen, pytest.raises(ValueError, match="was not called"):
        seen.stacked("")


def test_a_file_older_than_an_option_means_its_default(tmp_path):
    file, model, x = tmp_path / "m.safetensors", network(), torch.randn(4, 6)
    nc.recode(model, "0", layer=StoredProgramMemory, programs=3)
    nc.save(model, file)
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["neurocoder"])
    assert header["layers"][0]["options"].pop("control_features") is None
    save_file(load_file(file), file, metadata={"neurocoder": json.dumps(header)})
    again = nc.load(network(), file)
    assert torch.equal(again(x), model(x))
    assert nc.load(again, file) is again
    other = network()
    nc.recode(other, "0", layer=StoredProgramMemory, programs=3, control_features=6)
    with pytest.raises(ValueError, match="of other options"):
        nc.load(other, file)


def test_classes_may_be_words_and_wrong_use_is_said():
    model = nn.Sequential(nn.Linear(6, 5))
    nc.recode(model, "0", slots=3)
    report = nc.diagnose(model, torch.randn(4, 6), by=["cat", "dog", "cat", "cat"])
    assert {name: report.by[name]["0"].inputs for name in ("cat", "dog")} == {"cat": 3, "dog": 1}
    with pytest.raises(TypeError, match="auxiliary takes an nn"):
        nc.auxiliary(3)
    broken = nn.Sequential(nn.Linear(200, 200))
    broken[0].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="the weights of 0 are not finite"):
        nc.recode(broken, "*")
    assert type(broken[0]) is nn.Linear
