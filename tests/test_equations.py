"""The layers against the slow twins: outputs and gradients of every parameter in float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import neurocoder as nc
from tests import reference
from tests.strategies import options, shake

# float64 keeps 16 digits; sums of a few hundred terms lose six of them at most, and the derivative of the cosine of
# keys of one number, a difference of nearly equal ones, another
TOLERANCE = 1e-8
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Largest error relative to the largest entry of each tensor.

    A gradient far below the others, such as that of saturated attention, or zero but for rounding, as that of cosines
    of keys of length 1, is measured on a thousandth of the largest one's scale.
    """
    overall = max(b.abs().max().item() for b in theirs)
    errors = []
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        errors.append((a - b).abs().max().item() / max(b.abs().max().item(), 1e-3 * overall))
    return max(errors)


def gradients(layer: nn.Module, y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    wanted = [x, *layer.parameters()]
    grads = torch.autograd.grad((y * weights).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(grads, wanted, strict=True)]


def compare(layer: nn.Module, x: torch.Tensor, slow) -> float:
    x = x.requires_grad_()
    fast_y, slow_y = layer(x), slow(layer, x)
    weights = torch.randn_like(slow_y)
    return worst([fast_y, *gradients(layer, fast_y, x, weights)], [slow_y, *gradients(layer, slow_y, x, weights)])


@settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
@given(options=options(), seed=st.integers(0, 10**6), width=st.tuples(st.integers(1, 9), st.integers(1, 6)))
def test_linear_equals_the_slow_twin(options, seed, width):
    torch.manual_seed(seed)
    layer = nc.Linear(*width, **options)
    shake(layer)
    x = torch.randn(3, width[0], dtype=torch.float64)
    assert compare(layer, x, reference.linear) < TOLERANCE


@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
@given(
    options=options(),
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([1, 2]),
    kernel=st.sampled_from([1, 3, (1, 3)]),
    stride=st.sampled_from([1, 2]),
    dilation=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1, "same"]),
    mode=st.sampled_from(["zeros", "reflect", "circular"]),
)
def test_conv2d_equals_the_slow_twin(options, seed, groups, kernel, stride, dilation, padding, mode):
    if padding == "same":
        stride, mode = 1, "zeros"
    torch.manual_seed(seed)
    if isinstance(padding, int):
        padding = (padding, padding)
    layer = nc.Conv2d(4, 6, kernel, stride, padding, dilation, groups, padding_mode=mode, **options)
    shake(layer)
    x = torch.randn(2, 4, 7, 6, dtype=torch.float64)
    assert compare(layer, x, reference.conv2d) < TOLERANCE


@pytest.mark.parametrize("options", [{"heads": 2}, {"steps": 3, "least_used": 2, "residual": True}])
@pytest.mark.parametrize(
    ("x_shape", "lead"), [((2, 4, 6), (2,)), ((2, 4, 6), (2, 4)), ((2, 4, 3, 6), (2, 4)), ((6,), ())]
)
def test_one_program_for_all_rows_of_a_control(options, x_shape, lead):
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, slots=4, control_features=3, dtype=torch.float64, **options)
    shake(layer)
    control = torch.randn(*lead, 3, dtype=torch.float64)
    x = torch.randn(x_shape, dtype=torch.float64)
    torch.testing.assert_close(layer(x, control), reference.linear(layer, x, control), rtol=1e-9, atol=1e-12)
    assert layer.program(x, control).shape == (*lead, 6, 5)


def test_a_perturbed_slot_shows():
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, slots=4, steps=2, least_used=2, dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64)
    slow = reference.linear(layer, x)
    with torch.no_grad():
        layer.memory.left[2, 3] += 1e-3
    assert not torch.allclose(layer(x), slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("usages", ["ties", "one slot"])
def test_ties_in_usage_count_as_many_slots_as_there_are(usages):
    torch.manual_seed(0)
    slots = 6 if usages == "ties" else 1
    layer = nc.Linear(6, 5, slots=slots, steps=4, heads=2, least_used=min(3, slots), dtype=torch.float64)
    with torch.no_grad():  # equal keys and gates for all slots: every usage is the same
        for bank in reference.BANKS:
            getattr(layer.memory, f"{bank}_key_weight").zero_()
            getattr(layer.memory, f"{bank}_key_bias").fill_(1.0)
        layer.memory.gate_weight.zero_()
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), reference.linear(layer, x), rtol=1e-9, atol=1e-12)


def test_singular_triplets_in_memory_equal_the_matrix():
    """Each query names one slot, sharply: the program is then the matrix whose triplets the memory holds."""
    torch.manual_seed(0)
    rank = 3
    matrix = torch.randn(rank, 4, dtype=torch.float64)
    left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
    layer = nc.Linear(
        rank,
        4,
        slots=rank,
        heads=rank,
        key_dim=rank,
        sharpness=1e4,
        dtype=torch.float64,
        rules=nc.Rules(free_keys=("left", "right", "values")),
    )
    steps = torch.cat((sigma[:-1] - sigma[1:], sigma[-1:]))  # Eq. 8 sums them up again
    with torch.no_grad():
        layer.gain.fill_(1.0)
        layer.memory.left.copy_(left.t())
        layer.memory.right.copy_(right)
        layer.memory.values.copy_(steps.expm1().log())  # the inverse of softplus
        for bank in reference.BANKS:
            getattr(layer.memory, f"{bank}_keys").copy_(torch.eye(rank))
        layer.controller.weight.zero_()
        layer.controller.bias.copy_(torch.eye(rank).expand(3, rank, rank).flatten())
    x = torch.randn(5, rank, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.linear(x, matrix.t(), layer.bias))
    with nc.trace(layer) as seen:
        layer(x)
    torch.testing.assert_close(seen[""].sigma, sigma.expand(5, rank))
    with torch.no_grad():
        layer.memory.values[0] += 1e-3
    assert not torch.allclose(layer(x), F.linear(x, matrix.t(), layer.bias))


def test_the_controller_is_an_lstm():
    """Against nn.LSTM fed with the same input at every step (its gates stand in another order)."""
    torch.manual_seed(0)
    signal, recurrent = torch.randn(4 * 5, 3), torch.randn(4 * 5, 5)
    twin = nn.LSTM(4 * 5, 5)
    order = torch.arange(20).reshape(4, 5)[[0, 1, 3, 2]].flatten()  # ours: i f o g; theirs: i f g o
    with torch.no_grad():
        twin.weight_ih_l0.copy_(torch.eye(20)[order])
        twin.weight_hh_l0.copy_(recurrent[order])
        twin.bias_ih_l0.zero_()
        twin.bias_hh_l0.zero_()
    theirs, _ = twin(signal.t().expand(4, 3, 20))
    ours = nc.functional.lstm(signal, recurrent, 4)
    torch.testing.assert_close(ours.permute(1, 2, 0), theirs, rtol=1e-5, atol=1e-6)  # float32, four steps


def test_singular_values_by_hand():
    values, attention = torch.tensor([0.0, 1.0]), torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]])  # (slots, 2, 1)
    first, second = F.softplus(torch.tensor(0.0)), F.softplus(torch.tensor(1.0))
    sigma = {
        order: nc.functional.singular_values(values, attention, order).flatten()
        for order in ("descending", "first", "ascending")
    }
    torch.testing.assert_close(sigma["descending"], torch.stack((first + second, second)))
    torch.testing.assert_close(sigma["first"], torch.stack((first + second, first)))
    torch.testing.assert_close(sigma["ascending"], torch.stack((first, first + second)))


def test_least_used_attention_by_hand():
    usage = torch.tensor([0.5, 0.1, 0.4, 0.2])[None, :, None, None]
    least = nc.functional.least_used_attention(usage, 2, nc.Rules()).flatten()
    torch.testing.assert_close(least, torch.tensor([0.0, 0.4, 0.0, 0.3]))
    ones = nc.functional.least_used_attention(usage, 2, nc.Rules(least_used="one")).flatten()
    torch.testing.assert_close(ones, torch.tensor([0.0, 0.9, 0.0, 0.8]))


def test_orthogonality_by_hand():
    layer = nc.Linear(3, 2, slots=2, heads=1)
    with torch.no_grad():
        layer.memory.left.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))  # Gram - I: diag(0, 3)
        layer.memory.right.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # Gram - I: ones off the diagonal
    torch.testing.assert_close(nc.orthogonality(layer), torch.tensor(3 + 2**0.5))
    assert nc.orthogonality(nn.Linear(2, 2)) == 0
