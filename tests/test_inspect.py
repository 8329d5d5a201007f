"""Freezing programs and diagnosing layers."""

import copy
import warnings

import pytest
import torch
from torch import nn

import neurocoder as nc
from tests.strategies import shake


def layers(**options) -> list[tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    linear = nc.Linear(6, 5, slots=4, heads=2, dtype=torch.float64, **options)
    conv = nc.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, slots=4, heads=2, dtype=torch.float64, **options)
    for layer in (linear, conv):
        shake(layer)
    return [(linear, torch.randn(7, 6).double()), (conv, torch.randn(7, 4, 8, 8).double())]


@pytest.mark.parametrize(
    "options", [{}, {"controller_sees": "read"}, {"steps": 2, "least_used": 2, "residual": True}, {"bias": False}]
)
def test_a_frozen_program_is_a_plain_layer(options):
    for layer, x in layers(**options):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plain = nc.freeze(layer, x[:1])
        assert type(plain) in (nn.Linear, nn.Conv2d)
        torch.testing.assert_close(plain(x[:1]), layer(x[:1]))
        assert not torch.allclose(plain(x[1:2]), layer(x[1:2]))


@pytest.mark.parametrize("options", [{}, {"controller_sees": "read"}, {"steps": 2, "least_used": 2, "residual": True}])
def test_a_batch_freezes_to_its_mean_and_says_how_far_its_members_are(options):
    for layer, x in layers(**options):
        programs = layer.program(x)
        mean = programs.mean(0)
        away = (programs - mean).square().sum((1, 2)).mean().sqrt() / mean.norm()
        with pytest.warns(UserWarning, match=f"the mean of 7 programs; the members lie {away.item():.1%}"):
            plain = nc.freeze(layer, x)
        torch.testing.assert_close(plain.weight.flatten(1).t(), mean)


def test_freezing_a_frozen_base_and_what_cannot_be_frozen():
    model = nn.Sequential(nn.Linear(6, 5))
    nc.recode(model, "0", base="frozen", slots=4)
    shake(model[0].memory)
    x = torch.randn(6)
    torch.testing.assert_close(nc.freeze(model[0], x)(x), model(x))
    with pytest.raises(TypeError, match=r"takes an nc\.Linear or nc\.Conv2d, got a torch Sequential"):
        nc.freeze(model, x)
    with pytest.raises(ValueError, match="empty batch"):
        nc.freeze(model[0], torch.randn(0, 6))


def test_a_diagnosis_of_a_layer_solved_by_hand():
    """Sharp queries that name one slot each: entropy 0, two live slots, two orthogonal components, rank two."""
    layer = nc.Linear(
        4, 4, slots=4, heads=2, key_dim=4, sharpness=1e4, rules=nc.Rules(free_keys=("left", "right", "values"))
    )
    with torch.no_grad():
        layer.memory.left.copy_(torch.eye(4))
        layer.memory.right.copy_(torch.eye(4))
        layer.memory.values.copy_(torch.tensor([-40.0, 1.0, 1.0, 1.0]))  # the first component adds nothing to sigma
        for bank in ("left", "right", "values"):
            getattr(layer.memory, f"{bank}_keys").copy_(torch.eye(4))
        layer.controller.weight.zero_()
        layer.controller.bias.copy_(torch.eye(4)[:, :2].expand(3, 4, 2).flatten())
    found = nc.diagnose(layer, torch.randn(5, 4))[""]
    assert found.inputs == 5
    torch.testing.assert_close(found.usage, torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 3))
    assert found.dead == {"left": [2, 3], "right": [2, 3], "values": [2, 3]}
    torch.testing.assert_close(found.entropy, torch.zeros(3))
    assert found.entropy_input is found.entropy
    torch.testing.assert_close(found.entropy_batch, torch.full((3,), 2.0).log())
    torch.testing.assert_close(found.imbalance, torch.ones(3))
    assert found.similarity == pytest.approx(0, abs=1e-6)
    assert found.effective_rank == pytest.approx(2, rel=1e-3)
    assert "dead: left 2, right 2, values 2" in str(found)


def test_effective_rank_is_that_of_the_program():
    layer, x = layers(steps=3, least_used=2)[0]
    programs = layer.program(x)
    values = torch.linalg.svdvals(programs)
    share = values / values.sum(-1, keepdim=True)
    wanted = (-(torch.xlogy(share, share)).sum(-1)).exp().mean().item()
    assert nc.diagnose(layer, x)[""].effective_rank == pytest.approx(wanted, rel=1e-6)


def test_a_diagnosis_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(6), nc.Linear(6, 5, slots=4), nn.Dropout(), nn.Linear(5, 5).eval())
    before = copy.deepcopy(model.state_dict())
    found = nc.diagnose(model, torch.randn(8, 6))
    assert list(found) == ["1"]
    assert [module.training for module in model] == [True, True, True, False]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="empty batch"):
        nc.diagnose(model[1], torch.randn(0, 6))
    assert nc.diagnose(model[1], torch.randn(6))[""].inputs == 1
    with pytest.raises(ValueError, match="no conditional layer"):
        nc.diagnose(nn.Linear(2, 2), torch.randn(1, 2))


def test_batches_of_several_arguments():
    layer = nc.Linear(6, 5, slots=4, control_features=2)
    x, control = torch.randn(3, 6), torch.randn(3, 2)
    assert nc.diagnose(layer, (x, control))[""].inputs == 3
    assert nc.diagnose(layer, [x, control])[""].inputs == 3
    assert nc.diagnose(layer, {"x": x, "control": control})[""].inputs == 3


def test_a_diagnosis_says_what_is_wrong():
    model = nn.Sequential(nc.Linear(4, 3, slots=4))
    x = torch.randn(5, 4)
    with pytest.raises(KeyError, match="no conditional layer is called '1'; the nearest names: 0"):
        nc.diagnose(model, x)["1"]
    with nc.trace(model) as seen:
        model(x)
    with pytest.raises(KeyError, match="no conditional layer is called 0; the nearest names: 0"):
        seen[0]
    x[1, 2] = torch.nan
    with pytest.raises(ValueError, match="what '0' did is not finite: NaN in its inputs or its parameters"):
        nc.diagnose(model, x)
