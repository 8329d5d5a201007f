"""SparseAdam: the numbers of PyTorch's, its slow twin."""

import copy

import pytest
import torch
from torch import nn

import neurocoder as nc


def trained(kind: type[torch.optim.SparseAdam], table: nn.Embedding, steps: int, state: dict | None = None, **options):
    """The state after steps on rows that are drawn by lot, some twice in a step, in one of which there are none."""
    torch.manual_seed(1)
    optimiser = kind(table.parameters(), lr=0.1, **options)
    if state is not None:
        optimiser.load_state_dict(state)
    for step in range(steps):
        rows = torch.randint(len(table.weight), (0 if step == 2 else 12,))
        optimiser.zero_grad()
        table(rows).sin().sum().backward()
        optimiser.step()
    return optimiser.state_dict()


@pytest.mark.parametrize("options", [{}, {"betas": (0.5, 0.9), "eps": 1e-3}, {"maximize": True}])
def test_it_is_pytorchs(options):
    torch.manual_seed(0)
    table = nn.Embedding(20, 3, sparse=True, dtype=torch.float64)
    twin, before = copy.deepcopy(table), table.weight.detach().clone()
    mine, theirs = trained(nc.SparseAdam, table, 8, **options), trained(torch.optim.SparseAdam, twin, 8, **options)
    assert torch.allclose(table.weight, twin.weight, rtol=0, atol=1e-14)  # the same sums, rounded once more or less
    assert not torch.allclose(table.weight, before, rtol=0, atol=0.1)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(mine["state"][0][name], theirs["state"][0][name], rtol=0, atol=1e-14)
    assert mine["state"][0]["step"] == theirs["state"][0]["step"] == 8


def test_each_goes_on_from_the_others_state():
    torch.manual_seed(0)
    table = nn.Embedding(20, 3, sparse=True, dtype=torch.float64)
    twin = copy.deepcopy(table)
    mine, theirs = trained(nc.SparseAdam, table, 3), trained(torch.optim.SparseAdam, twin, 3)
    trained(torch.optim.SparseAdam, table, 5, mine)
    trained(nc.SparseAdam, twin, 5, theirs)
    assert torch.allclose(table.weight, twin.weight, rtol=0, atol=1e-14)


def test_what_it_cannot_take_is_refused_and_nothing_moves():
    first, second = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.zeros(5, 2))
    optimiser = nc.SparseAdam([first.weight, second])
    before = first.weight.detach().clone()
    (first(torch.arange(2)).sum() + second.sum()).backward()
    with pytest.raises(RuntimeError, match="takes sparse gradients, got a dense one for"):
        optimiser.step()
    second.grad = torch.eye(5)[:, :2].to_sparse()
    with pytest.raises(RuntimeError, match=r"whole rows, got one of 2 sparse dimensions for \(5, 2\)"):
        optimiser.step()
    assert torch.equal(first.weight, before)
    second.grad = None
    assert optimiser.step(torch.is_grad_enabled) is True  # gradients are on in a closure
    assert not torch.equal(first.weight, before)


def test_gradients_of_a_memory_come_in_order_each_row_once():
    torch.manual_seed(0)
    options = {"slots": 40, "heads": 3, "top_k": 2, "addresses": "fixed", "sparse": True, "dtype": torch.float64}
    for one_choice in (True, False):
        layer = nc.Linear(6, 4, one_choice=one_choice, **options)
        layer(torch.randn(16, 6, dtype=torch.float64)).square().sum().backward()
        _, rows = nc.split_parameters(layer)
        assert len(rows) == 3
        for p in rows:
            at = p.grad._indices()[0]  # pyright: ignore[reportOptionalMemberAccess]
            assert (at[1:] > at[:-1]).all()
