"""Constructors, shared memories, and what happens on bad input."""

from inspect import Parameter, signature

import pytest
import torch
from torch import nn

import neurocoder as nc

BAD_OPTIONS = [
    ({"slots": 0}, "slots must be at least 1"),
    ({"heads": 0}, "heads must be at least 1"),
    ({"steps": 0}, "steps must be at least 1"),
    ({"key_dim": 0}, "key_dim must be at least 1"),
    ({"least_used": 9}, "least_used must be a whole number between 0 and slots=4, got 9"),
    ({"least_used": -1}, "least_used must be a whole number between"),
    ({"sharpness": 0.0}, "sharpness must be a positive number"),
    ({"sharpness": float("nan")}, "sharpness must be a positive number"),
    ({"controller": 0}, "controller must be"),
    ({"controller": "gru"}, "controller must be 'linear', 'lstm' or a number"),
    ({"control_features": 0}, "control_features must be at least 1"),
    ({"controller_sees": "reads"}, "controller_sees must be 'input' or 'read', got 'reads'"),
    ({"controller_sees": "read", "control_features": 3}, "control_features=3 at a control: give one of them"),
    ({"compat": "paper"}, "compat must be None or 'authors'"),
    ({"compat": "authors", "rules": nc.Rules()}, "give one of them"),
    ({"rules": nc.Rules(gate="state"), "steps": 2, "least_used": 1, "controller": "linear"}, "recurrent controller"),
    ({"rules": nc.Rules(integration="lstm"), "residual": True}, "recurrent controller"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nc.Linear(6, 5, **{"slots": 4} | options)
    with pytest.raises(ValueError, match=message):
        nc.Conv2d(6, 5, 3, **{"slots": 4} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 2.5}, "slots must be a whole number, got 2.5"),
        ({"heads": True}, "heads must be a whole number"),
        ({"rules": "authors"}, "did you mean compat='authors'"),
        ({"memory": 5}, "memory takes an nc.ProgramMemory"),
        ({"bias": 30}, "bias must be True or False"),
    ],
)
def test_options_of_the_wrong_type_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        nc.Linear(6, 5, **{"slots": 4} | options)


@pytest.mark.parametrize("kind", [nc.Linear, nc.Conv2d])
def test_a_signature_spells_out_every_option(kind):
    parameters = signature(kind).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    options = {"slots": None, "heads": 1, "steps": 1, "key_dim": 5, "least_used": 0, "residual": False}
    options |= {"sharpness": None, "controller": None, "controller_sees": "input", "control_features": None}
    options |= {"top_k": None, "one_choice": False, "addresses": "learned", "product_keys": False, "sparse": False}
    options |= {"memory": None, "compat": None, "rules": None, "device": None, "dtype": None}
    assert {name: defaults[name] for name in [*defaults][-len(options) :]} == options
    assert all(parameters[name].kind is Parameter.KEYWORD_ONLY for name in options)
    with pytest.raises(TypeError, match="no option 'slot'; did you mean slots"):
        kind(4, 3, *[1] * (kind is nc.Conv2d), slot=2)


def test_rules_are_checked():
    with pytest.raises(ValueError, match=r"Rules.order must be one of 'descending', 'first', 'ascending', got 'desc'"):
        nc.Rules(order="desc")
    with pytest.raises(ValueError, match="the banks are left, right, values"):
        nc.Rules(free_keys=("lefft",))
    assert nc.Rules(free_keys=("values", "left")) == nc.Rules(free_keys=("left", "values"))


def test_a_zero_control_has_gradients_of_ordinary_size():
    torch.manual_seed(0)
    layer = nc.Linear(8, 4, slots=5, steps=3, heads=2, least_used=2, control_features=3)
    layer(torch.randn(2, 8), torch.zeros(2, 3)).sum().backward()
    assert all(p.grad.abs().max() < 100 for p in layer.parameters() if p.grad is not None)


def test_bad_input_is_refused():
    layer, conv = nc.Linear(6, 5, slots=4), nc.Conv2d(6, 5, 3, slots=4)
    with pytest.raises(ValueError, match=r"x of shape \(\.\.\., 6\), got \(2, 7\)"):
        layer(torch.randn(2, 7))
    with pytest.raises(TypeError, match=r"this layer is torch.float32, got x of torch.float64: convert one of them"):
        layer(torch.randn(2, 6).double())
    with pytest.raises(TypeError, match="takes a tensor, got x of type list"):
        layer([1.0])
    with pytest.raises(TypeError, match=r"floating point numbers, got x of torch.int64: convert it first"):
        layer(torch.ones(2, 6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"got \(\)"):
        layer(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"x of shape \(batch, 6, height, width\), got \(2, 5, 8, 8\)"):
        conv(torch.randn(2, 5, 8, 8))
    with pytest.raises(ValueError, match=r"control gives \(3,\) programs for a batch of \(2,\)"):
        conv(torch.randn(2, 6, 8, 8), torch.randn(3, 6))


def test_a_control_is_asked_for():
    layer = nc.Linear(6, 5, slots=4, control_features=3)
    with pytest.raises(ValueError, match=r"call it with control=, of shape \(\.\.\., 3\)"):
        layer(torch.randn(2, 6))
    with pytest.raises(ValueError, match=r"must begin that of x"):
        layer(torch.randn(2, 6), torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"must begin that of x"):
        layer(torch.randn(2, 6), torch.randn(2, 7, 3))
    with pytest.raises(ValueError, match=r"control of shape \(\.\.\., 3\), got \(2, 4\)"):
        layer(torch.randn(2, 6), torch.randn(2, 4))
    conv = nc.Conv2d(6, 5, 3, slots=4, control_features=3)
    with pytest.raises(ValueError, match="call it with control="):
        conv(torch.randn(2, 6, 8, 8))
    assert conv(torch.randn(2, 6, 8, 8), torch.randn(2, 3)).shape == (2, 5, 6, 6)
    assert conv(torch.randn(6, 8, 8), torch.randn(3)).shape == (5, 6, 6)


def test_a_control_of_its_own_width_may_replace_x():
    layer = nc.Linear(6, 5, slots=4)
    x = torch.randn(2, 6)
    torch.testing.assert_close(layer(x, x), layer(x))
    assert not torch.allclose(layer(x, torch.randn(2, 6)), layer(x))


def test_a_reading_controller_sees_nothing_but_the_read():
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, slots=3, heads=2, controller_sees="read")
    read = nn.functional.linear(x := torch.randn(2, 6), layer.memory.left)
    torch.testing.assert_close(layer(x, read), layer(x))  # a control of its width may replace it
    unread = torch.linalg.svd(layer.memory.left.detach())[2][-1]  # orthogonal to every left vector
    torch.testing.assert_close(layer.program(x + unread), layer.program(x))
    assert not torch.allclose(layer.program(x + layer.memory.left[0]), layer.program(x))
    conv = nc.Conv2d(6, 5, 3, slots=4, controller_sees="read")
    torch.testing.assert_close(conv(y := torch.randn(2, 6, 8, 8), conv._read(y).mean((2, 3))), conv(y))


def test_a_shared_memory_is_one_memory():
    first = nc.Linear(6, 5, slots=4, steps=2, least_used=2)
    before = first.memory.left.detach().clone()
    second = nc.Linear(6, 5, slots=4, steps=2, least_used=2, memory=first.memory)
    assert second.memory is first.memory
    assert torch.equal(first.memory.left, before)  # a second layer does not initialise it again
    model = nn.Sequential(first, nn.Linear(5, 6), second)
    torch.testing.assert_close(nc.orthogonality(model), nc.orthogonality(first))
    model(torch.randn(3, 6)).sum().backward()
    assert first.memory.left.grad.any()


@pytest.mark.parametrize("options", [{"slots": 3}, {"key_dim": 4}, {"least_used": 0}])
def test_a_memory_of_another_shape_is_refused(options):
    first = nc.Linear(6, 5, slots=4, steps=2, least_used=2)
    with pytest.raises(ValueError, match="this layer needs"):
        nc.Linear(6, 5, **{"slots": 4, "steps": 2, "least_used": 2} | options, memory=first.memory)
    with pytest.raises(ValueError, match="6x7"):
        nc.Linear(6, 7, slots=4, steps=2, least_used=2, memory=first.memory)


def test_usage_acts_from_the_second_step_on():
    """With one step there is no usage, and so no gate to train."""
    assert nc.Linear(6, 5, slots=4, least_used=2).memory.gate_weight is None
    assert nc.Linear(6, 5, slots=4, steps=2).memory.gate_weight is None
    assert nc.Linear(6, 5, slots=4, steps=2, least_used=2).memory.gate_weight.shape == (3, 4, 6)


def test_nothing_of_batch_times_in_times_out_is_formed():
    """The largest tensor of a step, forward and backward, stays far below one program an input."""
    rows, width = 64, 96
    for layer, x in (
        (nc.Linear(width, width, slots=4, heads=2, steps=2, least_used=1), torch.randn(rows, width)),
        (nc.Conv2d(width, width, 3, slots=4, heads=2), torch.randn(rows, width, 3, 3)),
    ):
        with torch.profiler.profile(record_shapes=True) as profile:
            layer(x).sum().backward()
        shapes = [shape for event in profile.events() for shape in event.input_shapes if shape]
        largest = max(torch.Size(shape).numel() for shape in shapes if all(isinstance(size, int) for size in shape))
        assert largest < rows * width * width / 4


def test_the_repr_says_what_it_is():
    assert repr(nc.Linear(6, 5, slots=4)).startswith("Linear(\n  6, 5, slots=4, heads=1, steps=1")
    assert "controller_sees=read" in repr(nc.Linear(6, 5, slots=4, controller_sees="read"))
    assert "kernel_size=(3, 3)" in repr(nc.Conv2d(6, 5, 3, slots=4))
