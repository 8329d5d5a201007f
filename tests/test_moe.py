"""The mixture of experts: its two ways to dispatch, its noise, and the losses that balance its load."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.peers import MixtureOfExperts
from tests.reference import mixture
from tests.strategies import shake


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
    torch.manual_seed(0)
    layer = shake(MixtureOfExperts(6, 5, experts=4, top_k=2, dtype=torch.float64)).eval()
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
        torch.testing.assert_close(y[n], mixture(layer, row, noisy))
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


def test_all_experts_chosen_are_all_loaded():
    layer = MixtureOfExperts(4, 3, experts=2, top_k=2).eval()
    nn.init.constant_(layer.gate[0], 0.01)
    report = nc.diagnose(layer, torch.rand(8, 4))[""]
    assert report.load.tolist() == [0.5, 0.5]
    assert report.dead == []


def test_balance_evens_the_load():
    torch.manual_seed(0)
    layer = MixtureOfExperts(6, 5, experts=4, top_k=1)
    with torch.no_grad():
        layer.gate[0] += 1
    x = torch.rand(256, 6)
    assert nc.diagnose(layer, x)[""].dead == [1, 2, 3]
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


def test_a_diagnosis_of_a_mixture_solved_by_hand():
    """Inputs e_0, e_0, e_1 with gates that read them: expert 0 twice, expert 1 once, experts 2 and 3 dead."""
    layer = MixtureOfExperts(2, 3, experts=4).eval()
    with torch.no_grad():
        layer.gate[:2] = torch.eye(2)
    report = nc.diagnose(layer, torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))[""]
    torch.testing.assert_close(report.importance, torch.tensor([2 / 3, 1 / 3, 0, 0]))
    torch.testing.assert_close(report.load, report.importance)
    assert report.dead == [2, 3]
    assert report.entropy_input == 0
    assert report.entropy_batch == pytest.approx(0.6365, abs=1e-4)
    assert report.load_imbalance == pytest.approx(1.1055, abs=1e-4)  # sqrt(mean([2/3,1/3,0,0]^2) * 16 - 1)


@pytest.mark.slow
def test_a_compiled_mixture_trains():
    torch._dynamo.reset()
    layer = MixtureOfExperts(6, 5, experts=4, top_k=2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(8, 6)).sum().backward()
    nc.peers.balance(compiled)[""].load.item()
    assert all(expert.weight.grad is not None for expert in layer.experts)
