"""What a trace sees, under which names."""

import pytest
import torch
from torch import nn

import neurocoder as nc
from tests import reference


def test_a_record_is_what_the_slow_twin_attends_to():
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, slots=4, steps=3, heads=2, least_used=2, residual=True, dtype=torch.float64)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    with nc.trace(layer) as seen:
        layer(x)
    record = seen[""]
    assert record.left.shape == record.right.shape == record.values.shape == (2, 3, 6, 4)
    assert record.sigma.shape == (2, 3, 6)
    assert record.residual.shape == (2, 3)
    assert (record.sigma > 0).all()
    assert (record.sigma[..., :-1] > record.sigma[..., 1:]).all()
    _, attention, sigma = reference.program(layer, x[1, 2])
    for bank in reference.BANKS:
        wanted = torch.stack([torch.stack(slots) for slots in attention[bank]])
        torch.testing.assert_close(getattr(record, bank)[1, 2], wanted)
    torch.testing.assert_close(record.sigma[1, 2], torch.stack(sigma))


def test_tracing_changes_nothing_but_rounding_and_ends_with_the_context():
    layer = nc.Linear(6, 5, slots=4, steps=2, least_used=2)
    x = torch.randn(3, 6)
    with nc.trace(layer) as seen:
        torch.testing.assert_close(layer(x), layer(x))
    layer(x)
    assert len(seen.calls("")) == 2
    assert "" in seen
    with pytest.raises(ValueError, match=r"was called 2 times: use seen.calls"):
        seen.get("")


def test_an_error_inside_ends_the_trace():
    layer = nc.Linear(6, 5, slots=4)
    with pytest.raises(ValueError, match="expects x of shape"), nc.trace(layer):
        layer(torch.randn(3, 7))
    assert layer._calls is None


def test_traces_may_nest():
    layer = nc.Linear(6, 5, slots=4)
    with nc.trace(layer) as outer:
        layer(torch.randn(1, 6))
        with nc.trace(layer) as inner:
            layer(torch.randn(2, 6))
        layer(torch.randn(3, 6))
    assert [len(call.left) for call in inner.calls("")] == [2]
    assert [len(call.left) for call in outer.calls("")] == [1, 2, 3]


def test_names_and_misnomers():
    model = nn.Sequential(nn.Linear(6, 6), nn.ModuleDict({"head": nc.Linear(6, 5, slots=4)}))
    with nc.trace(model) as seen:
        model[1]["head"](torch.randn(2, 6))
    assert list(seen) == ["1.head"]
    assert len(seen) == 1
    with pytest.raises(KeyError, match=r"no conditional layer is called 'head'; the nearest names: 1\.head"):
        seen["head"]


def test_a_loss_may_use_what_is_seen():
    layer = nc.Linear(6, 5, slots=4, steps=2, least_used=2)
    with nc.trace(layer) as seen:
        layer(torch.randn(3, 6))
    seen[""].left.square().sum().backward()
    assert layer.controller.weight.grad.any()


def test_convolution_and_sequences_have_one_program_each():
    conv = nc.Conv2d(3, 5, 3, slots=4, heads=2)
    with nc.trace(conv) as seen:
        conv(torch.randn(7, 3, 8, 8))
    assert seen[""].left.shape == (7, 2, 4)
    with nc.trace(conv) as seen:
        conv(torch.randn(3, 8, 8))
    assert seen[""].left.shape == (2, 4)
    assert conv.program(torch.randn(3, 8, 8)).shape == (27, 5)
    layer = nc.Linear(6, 5, slots=4, control_features=2)
    with nc.trace(layer) as seen:
        layer(torch.randn(7, 9, 6), torch.randn(7, 2))
    assert seen[""].left.shape == (7, 1, 4)
