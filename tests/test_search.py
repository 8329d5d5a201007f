"""Finding the slots that are read: the best of all, by blocks and by products, whatever the input; and only once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import neurocoder as nc
from neurocoder.functional import best, best_products, half_scores, product_score
from neurocoder.program import gather, search
from neurocoder.program.search import choose, largest


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_product_keys_find_the_best_of_all(side, count, seed):
    torch.manual_seed(seed)
    count = min(count, side * side)
    half = half_scores(torch.randn(3, 4, 2, 5, dtype=torch.float64), torch.randn(3, 2, side, 2, dtype=torch.float64))
    whole = product_score(half)
    (found, fast), (scores, slow) = best_products(half, count), best(whole, count)
    assert torch.equal(whole.gather(1, fast).sort(1).values, whole.gather(1, slow).sort(1).values)
    assert torch.equal(found.sort(1).values, scores.sort(1).values)
    assert whole.shape == (3, side * side, 2, 5)
    assert torch.equal(whole[:, side * (side - 1)], half[:, 0, -1] + half[:, 1, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_some_rows_both_ways(dtype, monkeypatch):
    torch.manual_seed(0)
    x, bank, slots = torch.randn(5, 7, dtype=dtype), torch.randn(9, 7, dtype=dtype), torch.randint(9, (5, 4))
    slots[:, 1] = slots[:, 0]  # two heads may read the same slot
    wanted = torch.einsum("yi,ysi->ys", x, bank[slots])
    for can, block in ((gather._multiplies_sparse, gather._BLOCK), (lambda: False, gather._BLOCK), (lambda: False, 60)):
        monkeypatch.setattr(gather, "_multiplies_sparse", can)
        monkeypatch.setattr(gather, "_BLOCK", block)  # the last: two rows at a time
        torch.testing.assert_close(gather._products(x, bank, slots), wanted)
        weights, read = torch.randn(5, 4, dtype=dtype), gather.Slots(slots.t()[None])
        room = torch.full((len(read.readers[0]), 7), torch.nan, dtype=dtype)
        gradient = gather._outer(weights, x, bank, read, room, sparse=True).to_dense()
        added = torch.zeros_like(bank).index_add_(
            0, slots.flatten(), torch.einsum("ys,yi->ysi", weights, x).flatten(0, 1)
        )
        torch.testing.assert_close(gradient, added)


@pytest.mark.parametrize(
    "options",
    [{}, {"one_choice": True}, {"slots": 400, "product_keys": True}, {"controller_sees": "read"}],
)
def test_reads_are_those_of_a_trace(options, monkeypatch):
    layer, x = nc.Linear(6, 3, **{"slots": 40, "heads": 2, "key_dim": 4, "top_k": 2} | options), torch.randn(5, 7, 6)
    with nc.trace(layer) as seen:
        layer(x)
    monkeypatch.setattr(search, "_HELD", 100)  # so that products are searched in several blocks
    assert torch.equal(layer.reads(x), seen[""].chosen)
    assert layer.reads(x[:0]).shape == (0, 7, 3, 2, 2)
    with pytest.raises(ValueError, match="every slot is read"):
        nc.Linear(6, 3, slots=4).reads(x)


@pytest.mark.parametrize("options", [{}, {"one_choice": True}, {"slots": 400, "product_keys": True, "sparse": True}])
def test_what_was_found_once_need_not_be_searched_again(options, monkeypatch):
    fixed: dict = {"slots": 40, "heads": 2, "key_dim": 4, "top_k": 1, "addresses": "fixed"}
    layer, x = nc.Linear(6, 3, **fixed | options).double(), torch.randn(5, 7, 6, dtype=torch.float64)
    wanted, reads = layer(x), layer.reads(x)
    with monkeypatch.context() as patch:
        patch.setattr(layer, "_signals", None)  # nobody looks at the input
        found = layer(x, reads=reads)
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(layer(x, reads=reads.flip(0)), wanted)
    moved = [p for p in layer.parameters() if p.requires_grad]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), moved) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a.to_dense(), b.to_dense())
    per_sequence = layer(x, reads=reads[:, 0])  # one program a sequence
    torch.testing.assert_close(per_sequence[:, 0], wanted[:, 0])
    for wrong in (reads.float(), reads[..., 0], reads[:3], reads[:, :, None].expand(-1, -1, 6, -1, -1, -1)):
        with pytest.raises(ValueError, match=r"int64 of \(..., 3, 2, 1\)"):
            layer(x, reads=wrong)
    with pytest.raises(ValueError, match=f"slots 0 to {layer.slots - 1}, reads has"):
        layer(x, reads=reads + layer.slots)
    with pytest.raises(ValueError, match="call the layer without reads="), nc.trace(layer):
        layer(x, reads=reads)
    with pytest.raises(TypeError, match=r"reads must be a tensor, as .* gives it, got list"):
        layer(x, reads=reads.tolist())
    with pytest.raises(ValueError, match="reads= stands for the control: give one of them"):
        layer(x, x, reads=reads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{"slots": slots} for slots in (20, 50, 400, 1000, 2000, 5000)]
    + [{"slots": slots, "product_keys": True} for slots in (400, 2500)],
)
def test_an_input_that_is_not_finite_disturbs_no_other(options, dtype):
    torch.manual_seed(0)
    layer, x = nc.Linear(6, 3, heads=2, key_dim=4, top_k=2, **options).to(dtype), torch.randn(64, 6, dtype=dtype)
    wanted = layer(x)
    x[1, 2], x[3, 0] = torch.nan, torch.inf
    y = layer(x)
    y.nansum().backward()
    others = torch.tensor([row not in (1, 3) for row in range(64)])
    assert torch.equal(y.isnan().any(1), ~others)
    torch.testing.assert_close(y[others], wanted[others])
    with pytest.raises(ValueError, match="finite"):
        nc.diagnose(layer, x)


@pytest.mark.parametrize("slots", [40, 1000, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_key_that_is_not_finite_is_not_hidden(slots, dtype):
    layer = nc.Linear(6, 3, slots=slots, heads=2, top_k=2, one_choice=True, dtype=dtype)
    with torch.no_grad():
        layer.memory.shared_keys[3] = torch.nan
    assert layer(torch.randn(50, 6, dtype=dtype)).isnan().all()


def test_many_queries_are_searched_in_parts(monkeypatch):
    layer = nc.Linear(6, 3, slots=2000, heads=2, top_k=2, one_choice=True).double()
    x = torch.randn(50, 6, dtype=torch.float64)  # in which rounding decides nothing
    wanted = layer.reads(x)
    monkeypatch.setattr(search, "_SOUGHT", 7)
    assert torch.equal(layer.reads(x), wanted)


@pytest.mark.parametrize(
    "options", [{"addresses": "learned"}, {"top_k": 2}, {"residual": True}, {"controller_sees": "read"}]
)
def test_what_may_change_is_searched_every_time(options):
    layer = nc.Linear(6, 3, **{"slots": 40, "heads": 2, "top_k": 1, "addresses": "fixed"} | options)
    with pytest.raises(ValueError, match="others look at their input at every call"):
        layer(torch.randn(5, 6), reads=layer.reads(torch.randn(5, 6)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("slots", [1000, 1088, 2048, 3001])
def test_the_search_by_blocks_finds_the_best(slots, dtype):
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, slots=slots, heads=3, top_k=4, sparse=True, dtype=dtype)
    query = torch.randn(3, 5, 3, 40, dtype=dtype)
    found = choose(query, layer.memory.keys(), layer.addressing).slot_MkRN
    wanted = torch.einsum("mpk,mkrn->mprn", layer.memory.keys(), query).topk(4, 1).indices
    assert torch.equal(found.sort(1).values, wanted.sort(1).values)


@given(st.integers(1, 6), st.integers(1, 300), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_largest_is_topk(count, width, seed):
    torch.manual_seed(seed)
    score = torch.randn(7, max(count, width)) * 10.0 ** torch.randint(-6, 6, (7, 1))
    for dim, own in enumerate((score.t(), score)):
        values, places = largest(own, count, dim)
        wanted = own.topk(count, dim)
        assert torch.equal(values, wanted.values)
        assert torch.equal(places, wanted.indices)
