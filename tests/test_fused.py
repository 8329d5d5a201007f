"""The hand-written composition against the plain one: blocks of rows, many least-used slots, sharp attention, batches
of gradients. tests/test_equations.py compares both with the slow twins."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import neurocoder as nc
from neurocoder import functional
from neurocoder.program import kept
from neurocoder.program.kernel import equations, fused, lean, usage

PAPER = nc.Rules()


def tensors(gate: int, slots: int = 12, steps: int = 4, heads: int = 2, rows: int = 9):
    """query, key, gate, read, values; a gate for each slot (1), for each component (2) or none."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    gates = normal(3, slots, (1, steps * heads)[gate - 1], rows) if gate else None
    return [normal(3, 3, steps * heads, rows), normal(3, slots, 3), gates, normal(slots, rows), normal(slots)]


def both(given, setting):
    """Outputs and gradients, by hand and plain."""
    leaves = [tensor for tensor in given if tensor is not None]
    query, key, *rest = given
    sharp = functional.sharpen(key, setting.sharpness)
    by_hand = fused.compose_rows(query, sharp, *rest, setting, PAPER)
    plain = fused.plain(query, sharp, *rest, setting)
    weights = [torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out) for out in plain]
    grads = [torch.autograd.grad(out, leaves, weights, retain_graph=True) for out in (by_hand, plain)]
    return ([*out, *grad] for out, grad in zip((by_hand, plain), grads, strict=True))


@pytest.mark.parametrize("gate", [0, 1, 2])
@pytest.mark.parametrize(("least_used", "sharpness"), [(1, 3.0), (3, 3.0), (11, 3.0), (12, 3.0), (3, 300.0)])
def test_by_hand_equals_plain(gate, least_used, sharpness):
    setting = fused.Setting(heads=2, least_used=least_used, sharpness=sharpness)
    for a, b in zip(*both(tensors(gate), setting), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_blocks_of_rows_change_nothing(monkeypatch):
    given, setting = tensors(gate=1), fused.Setting(2, 3, 3.0)
    whole, _ = both(given, setting)
    monkeypatch.setattr(fused, "_BLOCK", 3 * 12 * 2 * 2)  # two rows a block, and one left over
    blocks, _ = both(given, setting)
    for a, b in zip(blocks, whole, strict=True):
        torch.testing.assert_close(a, b)


def test_only_a_cpu_cuts_rows_into_blocks(monkeypatch):
    calls, honest = [], fused._forward
    monkeypatch.setattr(fused, "_BLOCK", 1)  # a row a block
    monkeypatch.setattr(fused, "_forward", lambda inputs: calls.append(1) or honest(inputs))
    for device, wanted in (("cpu", 9), ("meta", 1)):
        calls.clear()
        given = [tensor.detach().to(device) for tensor in tensors(gate=1)]
        part, _ = fused.compose_rows(*given, fused.Setting(2, 12, 3.0), PAPER)
        assert (len(calls), part.shape) == (wanted, (12, 9))


def test_a_layer_takes_the_fast_path_and_a_wrong_backward_would_show(monkeypatch):
    given, setting = tensors(gate=1), fused.Setting(2, 3, 3.0)
    part, _ = fused.compose_rows(*given, setting, PAPER)
    assert type(part.grad_fn).__name__ == "_ComposeBackward"
    honest = usage.attend_backward
    monkeypatch.setattr(usage, "attend_backward", lambda d, *rest: honest(d, *rest) * 1.001)
    by_hand, plain = both(given, setting)
    assert not all(torch.allclose(a, b, rtol=1e-8, atol=1e-8) for a, b in zip(by_hand, plain, strict=True))


def test_a_pytorch_without_its_private_words_gives_the_same(monkeypatch):
    layer, x = nc.Linear(5, 3, slots=4, heads=2), torch.randn(2, 5)
    with torch.no_grad(), nc.cached(layer):
        wanted = layer(x)
        assert not kept.watched()
        with monkeypatch.context() as changed:
            changed.setattr(kept, "forward_ad", object())
            assert kept.watched()  # whoever cannot know must assume it
        for module in (kept, fused, lean):
            monkeypatch.setattr(module, "watched", lambda: True)
        torch.testing.assert_close(layer(x), wanted)


def test_a_batch_of_gradients_at_once():
    layer = nc.Linear(5, 3, slots=4, steps=3, least_used=2, dtype=torch.float64)
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    directions = torch.randn(4, *y.shape, dtype=torch.float64)
    (together,) = torch.autograd.grad(y, x, directions, is_grads_batched=True, retain_graph=True)
    for direction, grad in zip(directions, together, strict=True):
        torch.testing.assert_close(grad, torch.autograd.grad(y, x, direction, retain_graph=True)[0])


def test_unit_queries_of_length_zero_are_no_nan():
    query = torch.zeros(3, 2, 1, 1, requires_grad=True)
    score = functional.score(query, functional.sharpen(torch.randn(3, 4, 2), 3.0))
    assert not score.any()
    score.sum().backward()
    assert query.grad.isfinite().all()


def test_what_is_kept_for_later_calls_is_never_a_tensor_without_numbers():
    with FakeTensorMode():
        equations.ladder(torch.empty(7, 2))
    torch.testing.assert_close(equations.ladder(torch.empty(7, 2)), torch.ones(7, 7).triu())
