"""Memories of which each component reads a few slots: by mask, by gathering, and the slow twin."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import neurocoder as nc
from tests import reference
from tests.strategies import reading, shake
from tests.test_equations import QUIET, compare, gradients, worst

TOLERANCE = 1e-9  # float64, where a sum has a few terms


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(options=reading(), seed=st.integers(0, 10**6))
def test_gathered_masked_and_slow_are_equal(options, seed):
    layer, made, slow = both_ways(options, seed)
    for layer.gathers in (False, True):
        assert worst(made(), slow) < TOLERANCE


def both_ways(options: dict, seed: int) -> tuple[nc.Linear, Callable[[], list[torch.Tensor]], list[torch.Tensor]]:
    """A layer, what makes its outputs and gradients, and those of the slow twin."""
    torch.manual_seed(seed)
    layer = shake(nc.Linear(6, 5, **options))
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 5, dtype=torch.float64)

    def made(y: torch.Tensor) -> list[torch.Tensor]:
        return [y, *gradients(layer, y, x, weights)]

    return layer, lambda: made(layer(x)), made(reference.linear(layer, x))


@pytest.mark.parametrize("options", [{}, {"one_choice": True}, {"product_keys": True, "key_dim": 4}])
def test_sparse_gradients_are_the_dense_ones(options):
    torch.manual_seed(0)
    options |= {"slots": 49, "heads": 3, "top_k": 2, "dtype": torch.float64, "rules": nc.Rules(free_keys=FREE)}
    sparse, dense = nc.Linear(6, 5, sparse=True, **options), nc.Linear(6, 5, **options)
    twin(sparse, dense)
    x = torch.randn(7, 6, dtype=torch.float64)
    for layer in (sparse, dense):
        layer(x).square().sum().backward()
    rest, rows = nc.split_parameters(sparse)
    assert {p.grad.layout for p in rows} == {torch.sparse_coo}
    assert {p.grad.layout for p in rest} == {torch.strided}
    theirs = dict(dense.named_parameters())
    for name, parameter in sparse.named_parameters():
        mine, other = parameter.grad.to_dense(), theirs[plain_name(name)].grad
        assert torch.allclose(mine.view_as(other), other, rtol=0, atol=1e-12), name


FREE = ("left", "right", "values")


def plain_name(name: str) -> str:
    """What a parameter of a sparse memory is called in another one."""
    return name.replace("_rows.weight", "")


def twin(sparse: nn.Module, dense: nn.Module) -> None:
    """Give both the same parameters."""
    mine = {plain_name(name): tensor for name, tensor in sparse.state_dict().items()}
    dense.load_state_dict({name: mine[name].view_as(old) for name, old in dense.state_dict().items()})


def test_sgd_gives_the_same_weights_by_sparse_and_dense_gradients():
    torch.manual_seed(0)
    options = {"slots": 30, "heads": 2, "top_k": 2, "one_choice": True, "addresses": "fixed"}
    sparse, dense = nc.Linear(8, 4, sparse=True, **options), nc.Linear(8, 4, **options)
    twin(sparse, dense)
    optimisers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in (sparse, dense)]
    for _ in range(20):
        x, y = torch.randn(16, 8), torch.randn(16, 4)
        for layer, optimiser in zip((sparse, dense), optimisers, strict=True):
            optimiser.zero_grad()
            (layer(x) - y).square().mean().backward()
            optimiser.step()
    theirs = dict(dense.named_parameters())
    for name, parameter in sparse.named_parameters():
        other = theirs[plain_name(name)]
        assert torch.allclose(parameter.view_as(other), other, atol=1e-6), name  # float32, sums in another order


def test_rows_that_were_not_read_stay_where_they_are():
    torch.manual_seed(0)
    layer = nc.Linear(8, 4, slots=50, heads=2, top_k=1, one_choice=True, addresses="fixed", sparse=True)
    before = copy.deepcopy(layer)
    rest, rows = nc.split_parameters(layer)
    optimisers = [torch.optim.Adam(rest, 0.1), nc.SparseAdam(rows, 0.1)]
    read = torch.zeros(50, dtype=torch.bool)
    for _ in range(5):
        x = torch.randn(3, 8)
        with nc.trace(layer) as seen:
            y = layer(x)
        read[seen[""].chosen.flatten()] = True
        for optimiser in optimisers:
            optimiser.zero_grad()
        y.square().sum().backward()
        for optimiser in optimisers:
            optimiser.step()
    moved = (layer.memory.left != before.memory.left).any(1)
    assert 0 < read.sum() < 50
    assert torch.equal(moved, read)
    assert torch.equal(layer.memory.shared_keys, before.memory.shared_keys)
    assert torch.equal(layer.controller.weight, before.controller.weight)
    assert not {"controller.weight", "memory.shared_keys"} & {*dict(layer.named_parameters())}


def test_one_slot_of_one_choice_is_its_rank_one_product():
    """Where the cleverness vanishes: each head adds its best slot, by its singular value."""
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, False, slots=40, heads=3, top_k=1, one_choice=True, sparse=True, dtype=torch.float64)
    x, memory = torch.randn(2, 6, dtype=torch.float64), layer.memory
    with nc.trace(layer) as seen:
        y = layer(x)
    record = seen[""]
    assert record.chosen.shape == (2, 3, 3, 1)
    assert torch.equal(record.chosen[:, 0], record.chosen[:, 2])
    for row in range(2):
        slots = record.chosen[row, 0, :, 0]
        terms = nn.functional.softplus(memory.values[slots])
        sigma = terms.flip(0).cumsum(0).flip(0)
        expected = ((memory.left[slots] @ x[row]) * sigma * layer.gain) @ memory.right[slots]
        assert torch.allclose(y[row], expected, rtol=0, atol=1e-12)
    assert (record.left > 0).sum() == 6
    assert torch.equal(record.left.sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_a_program_and_a_frozen_layer_hold_what_was_read():
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, False, slots=400, heads=2, top_k=2, sparse=True, residual=True, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)
    y = layer(x)
    assert torch.allclose(torch.einsum("bi,bio->bo", x, layer.program(x)), y)
    assert torch.allclose(nc.freeze(layer, x[0])(x[0]), y[0])
    with pytest.warns(UserWarning, match="the mean of 4 programs"):
        nc.freeze(layer, x)


def test_one_program_a_sequence():
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, slots=100, heads=2, top_k=2, control_features=3, sparse=True)
    x, control = torch.randn(2, 4, 6), torch.randn(2, 3)
    y = layer(x, control)
    rows = layer(x.flatten(0, 1), control.repeat_interleave(4, 0))
    assert torch.allclose(y, rows.unflatten(0, (2, 4)), atol=1e-6)
    assert not torch.allclose(y[0], y[1])
    assert layer(x[:0], control[:0]).shape == (0, 4, 5)


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 30, "sparse": True, "one_choice": True},
        {"slots": 36, "key_dim": 4, "product_keys": True, "addresses": "fixed"},
    ],
)
def test_a_file_holds_addresses_and_rows(options, tmp_path):
    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    torch.manual_seed(0)
    model = network()
    nc.recode(model, "*", heads=2, top_k=2, **options)
    nc.save(model, tmp_path / "m.safetensors")
    other = nc.load(network(), tmp_path / "m.safetensors")
    x = torch.randn(5, 6)
    assert torch.equal(model(x), other(x))
    assert other[0].addressing == model[0].addressing
    assert {*dict(other.named_buffers())} == {*dict(model.named_buffers())}
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_slots_are_chosen_with_room_for_what_is_read():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 100))
    x = torch.randn(3, 300)
    before = model(x)
    assert nc.recode(model, "*", top_k=3, sparse=True) == ["0", "2"]
    assert all(layer.slots >= 3 for layer in (model[0], model[2]))
    assert torch.allclose(model(x), before, atol=1e-5)


def test_diagnose_says_which_slots_were_read():
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, slots=60, heads=2, top_k=1, one_choice=True, addresses="fixed")
    x = torch.randn(8, 6)
    with nc.trace(layer) as seen:
        layer(x)
    told: Any = nc.diagnose(layer, x)[""]
    read = (told.read[0] > 0).nonzero().flatten().tolist()
    assert read == sorted({*seen[""].chosen.flatten().tolist()})
    assert len(read) < 20
    assert set(told.dead["left"]) == set(range(60)) - set(read)


def test_what_needs_slots_says_so():
    model = nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    with pytest.raises(ValueError, match="give slots="):
        nc.recode(model, "*", top_k=2, key_dim=4, product_keys=True)
    with pytest.raises(ValueError, match="product keys name n \\* n: leave out one of them"):
        nc.recode(model, "*", parameters=80_000, top_k=2, key_dim=4, product_keys=True)
    with pytest.raises(ValueError, match="give slots= to start afresh, or base='frozen'"):
        nc.recode(model, "*", top_k=2, addresses="fixed")
    with pytest.raises(ValueError, match="give top_k=2 or more, slots= to start afresh, or base='frozen'"):
        nc.recode(model, "*", top_k=1)
    assert nc.recode(model, "*", base="frozen", top_k=2, addresses="fixed") == ["0", "2"]
    assert len(model[0].reads(torch.randn(64, 200)).flatten(1).unique(dim=0)) > 32


def test_orthogonal_loss_leaves_sparse_memories_alone():
    sparse = nc.Linear(6, 5, slots=20, heads=2, top_k=1, sparse=True)
    assert nc.orthogonality(sparse) == 0
    assert nc.auxiliary(sparse) == 0
    assert nc.orthogonality(nc.Linear(6, 5, slots=20, heads=2, top_k=1)) > 0


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"top_k": 31}, ValueError, "top_k must be at most slots=30, got 31"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1"),
        ({"top_k": 1.5}, TypeError, "top_k must be a whole number"),
        ({"sparse": True}, ValueError, "sparse=True needs top_k="),
        ({"one_choice": True}, ValueError, "one_choice=True needs top_k="),
        ({"top_k": 2, "product_keys": True, "key_dim": 4}, ValueError, "slots=30 is no square; the nearest: 25, 36"),
        ({"top_k": 2, "product_keys": True, "slots": 36}, ValueError, "key_dim must be even, got 5"),
        ({"addresses": "random"}, ValueError, "addresses must be 'learned' or 'fixed', got 'random'"),
        ({"top_k": 2, "sparse": 1}, TypeError, "sparse must be True or False, got 1"),
        ({"top_k": 2, "steps": 2, "least_used": 2}, ValueError, "usage looks at every slot"),
        ({"top_k": 2, "sparse": True, "controller_sees": "read"}, ValueError, "reads every slot"),
    ],
)
def test_what_cannot_be_is_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        nc.Linear(6, 5, **{"slots": 30} | options)


def test_an_optimiser_that_cannot_take_sparse_gradients_says_so():
    layer = nc.Linear(6, 5, slots=30, top_k=2, sparse=True)
    layer(torch.randn(3, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients, please consider SparseAdam instead"):
        torch.optim.Adam(layer.parameters()).step()
    with pytest.raises(TypeError, match="split_parameters takes"):
        nc.split_parameters([layer])


@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
@given(options=reading(may_be_sparse=False), seed=st.integers(0, 10**6), groups=st.sampled_from([1, 2]))
def test_convolutions_read_by_mask(options, seed, groups):
    torch.manual_seed(seed)
    layer = shake(nc.Conv2d(4, 6, 3, padding=1, groups=groups, **options))
    assert compare(layer, torch.randn(2, 4, 5, 4, dtype=torch.float64), reference.conv2d) < TOLERANCE


def test_a_convolution_cannot_be_sparse():
    with pytest.raises(ValueError, match="a convolution reads every slot at every position: leave out sparse=True"):
        nc.Conv2d(2, 3, 3, slots=8, heads=2, top_k=2, sparse=True)


READINGS = [
    {},
    {"one_choice": True},
    {"product_keys": True, "key_dim": 4, "slots": 100},
    {"controller_sees": "read"},
    {"sparse": True},
]


@pytest.mark.parametrize("options", READINGS)
def test_derivatives_that_are_differentiated_again(options):
    torch.manual_seed(0)
    layer = shake(nc.Linear(4, 3, **{"slots": 40, "heads": 2, "top_k": 2, "dtype": torch.float64} | options))
    assert layer.gathers
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def loss(x):
        return layer(x).square().sum()

    wanted = [x, *layer.parameters()]
    once = torch.autograd.grad(loss(x), wanted)
    again = torch.autograd.grad(loss(x), wanted, create_graph=True)
    assert worst([one.to_dense() for one in once], again) < TOLERANCE
    second = [torch.autograd.grad(one, x, retain_graph=True)[0].flatten() for one in again[0].flatten()]
    assert worst([torch.stack(second)], [torch.func.hessian(loss)(x.detach()).view(12, 12)]) < TOLERANCE


@pytest.mark.parametrize("options", READINGS)
def test_gradients_in_a_batch(options):
    torch.manual_seed(0)
    layer = shake(nc.Linear(4, 3, **{"slots": 40, "heads": 2, "top_k": 2, "dtype": torch.float64} | options))
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    each = torch.eye(6, dtype=torch.float64).view(6, 2, 3)
    (found,) = torch.autograd.grad(layer(x), x, each, is_grads_batched=True)
    assert worst([found], [torch.func.jacrev(layer)(x.detach()).view(6, 2, 4)]) < TOLERANCE


def test_gradients_inside_of_autocast_are_those_outside():
    torch.manual_seed(0)
    layer, x, found = nc.Linear(8, 4, slots=60, heads=2, top_k=2), torch.randn(32, 8), []
    for inside in (True, False):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(x).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss.backward()
        found.append(layer.memory.values.grad.clone())
    assert torch.equal(*found)


def test_functional_transforms():
    torch.manual_seed(0)
    layer = nc.Linear(4, 3, slots=40, heads=2, top_k=2, dtype=torch.float64)
    assert layer.gathers
    x = torch.randn(3, 4, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(given, row):
        return torch.func.functional_call(layer, given, (row[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    layer.zero_grad()
    layer(x).square().sum().backward()
    for name, parameter in parameters.items():
        assert torch.allclose(each[name].sum(0), parameter.grad), name


def test_a_large_memory_starts_quickly_and_as_loud_as_a_linear_layer():
    torch.manual_seed(0)
    layer = nc.Linear(
        64, 64, slots=10_000, heads=4, key_dim=8, top_k=2, one_choice=True, product_keys=True, sparse=True
    )
    with torch.no_grad():
        variance = layer(torch.randn(512, 64)).var()
    assert 0.2 < variance < 0.5  # a fresh nn.Linear: 1/3


@pytest.mark.parametrize("kind", [torch.bfloat16, None])
def test_half_precision(kind):
    torch.manual_seed(0)
    layer = nc.Linear(8, 4, slots=60, heads=2, top_k=2, sparse=True, dtype=kind)
    x = torch.randn(3, 8, dtype=kind)
    if kind is None:
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
    else:
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.memory.left.grad.is_sparse
    assert layer.memory.left.grad.dtype == layer.memory.left.dtype


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"product_keys": True, "key_dim": 4, "one_choice": True}, {"sparse": True}])
def test_gathering_compiles_and_exports(options):
    """Compiled, gradients are dense."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, slots=64, heads=2, top_k=2, dtype=torch.float64, **options)
    x = torch.randn(4, 6, dtype=torch.float64)
    found = []
    for network in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        y = network(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.to_dense().clone() for p in layer.parameters())])
    assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    rows = torch.randn(7, 6, dtype=torch.float64)
    assert torch.allclose(exported.module()(rows), layer(rows))
