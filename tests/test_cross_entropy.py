"""The cross-entropy in blocks: against its slow twin, and under what PyTorch offers."""

from math import log

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, vmap
from torch.nn import functional as F

from neurocoder import cross_entropy
from neurocoder.functional import linear_cross_entropy


def twin(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Row by row, output by output."""
    losses = []
    for row, wanted in zip(x.reshape(-1, x.shape[-1]), target.flatten(), strict=True):
        logits = [row @ w + (0 if bias is None else bias[o]) for o, w in enumerate(weight)]
        losses.append(sum(logit.exp() for logit in logits).log() - logits[wanted])
    return torch.stack(losses).view(target.shape)


def problem(*lead: int, bias: bool = True, dtype=torch.float64):
    torch.manual_seed(0)
    x, weight = torch.randn(*lead, 4, dtype=dtype, requires_grad=True), torch.randn(7, 4, dtype=dtype)
    b = torch.randn(7, dtype=dtype).requires_grad_() if bias else None
    return x, weight.requires_grad_(), b, torch.randint(7, lead)


@pytest.fixture(params=[2**18, 7 * 4, 1], ids=["one block", "several", "a row each"])
def _blocks(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_NUMBERS", {"cpu": request.param})
    monkeypatch.setattr(cross_entropy, "_ROWS", 1)


@pytest.fixture(params=[60.0, 0.0], ids=["as they are", "shifted"])
def _logits(request, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_SAFE", request.param)


@pytest.mark.usefixtures("_blocks", "_logits")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(9,), (3, 5)])
def test_it_is_its_slow_twin_and_has_its_gradients(lead, bias):
    inputs = problem(*lead, bias=bias)
    found, wanted = linear_cross_entropy(*inputs), twin(*inputs)
    assert found.shape == lead
    torch.testing.assert_close(found, wanted)
    tensors = [tensor for tensor in inputs[:3] if tensor is not None]
    for d_loss in (torch.randn(lead).double(), torch.full(lead, -3.0).double()):  # the second is known ahead
        kept = (torch.autograd.grad(loss, tensors, d_loss, retain_graph=True) for loss in (found, wanted))
        for a, b in zip(*kept, strict=True):
            torch.testing.assert_close(a, b)
    assert not torch.allclose(linear_cross_entropy(*inputs[:3], (inputs[3] + 1) % 7), wanted)  # it can fail


def test_large_logits_neither_overflow_nor_vanish():
    x, weight, bias, target = problem(9, dtype=torch.float32)
    for shift in (-3000.0, 3000.0):
        shifted = (bias + shift).detach().requires_grad_()
        loss = linear_cross_entropy(x, 50 * weight, shifted, target)
        wanted = F.cross_entropy(F.linear(x, 50 * weight, shifted), target, reduction="none")
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-2)  # 3,000 has four digits after the point
        assert torch.autograd.grad(loss.sum(), x)[0].isfinite().all()


def test_norms_at_and_beyond_the_ends_of_what_needs_no_shift_are_exact(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_NUMBERS", {"cpu": 1})
    monkeypatch.setattr(cross_entropy, "_ROWS", 1)  # a row each: one that is shifted does not shift the others
    norms = torch.tensor([[-200.0], [-61], [-59.9], [0], [59.9], [61], [200]])
    x, weight = norms - log(10_000), torch.ones(10_000, 1)
    weight[-1] = 0.5
    loss = linear_cross_entropy(x, weight, None, torch.zeros(7, dtype=torch.long))
    wanted = F.cross_entropy(x.double() @ weight.double().t(), torch.zeros(7, dtype=torch.long), reduction="none")
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)


def test_on_meta_there_is_nothing_to_look_at():
    with torch.device("meta"):
        x, weight = torch.empty(9, 4, requires_grad=True), torch.empty(7, 4, requires_grad=True)
        linear_cross_entropy(x, weight, None, torch.zeros(9, dtype=torch.long)).mean().backward()
    assert weight.grad.shape == (7, 4)


def test_no_rows():
    x, weight, bias, target = problem(0)
    loss = linear_cross_entropy(x, weight, bias, target)
    loss.sum().backward()
    assert loss.shape == (0,)
    assert not weight.grad.any()
    assert not bias.grad.any()
    assert x.grad.shape == (0, 4)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_full(kind):
    x, weight, bias, target = problem(9, dtype=torch.float32)
    wanted = linear_cross_entropy(x, weight, bias, target)
    with torch.autocast("cpu", kind):
        inside = linear_cross_entropy(x, weight, bias, target)
        inside.sum().backward()
    assert torch.equal(inside, wanted)
    halves = [tensor.detach().to(kind).requires_grad_() for tensor in (x, weight, bias)]
    loss = linear_cross_entropy(*halves, target)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=0.05, atol=0.05)  # what rounding the inputs to 8 bits changes
    assert {tensor.grad.dtype for tensor in halves} == {kind}


def test_gradients_of_every_sample_and_of_every_member():
    x, weight, bias, target = (tensor.detach() for tensor in problem(5))

    def loss(function, x, weight, target):
        return function(x[None], weight, bias, target[None]).sum()

    for dims, many in (((0, None, 0), weight), ((0, 0, 0), torch.stack([weight * n for n in range(1, 6)]))):
        found, wanted = (
            vmap(grad(lambda x, w, t, f=function: loss(f, x, w, t), (0, 1)), dims)(x, many, target)
            for function in (linear_cross_entropy, lambda *a: F.cross_entropy(F.linear(*a[:3]), a[3], reduction="none"))
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
        losses = vmap(linear_cross_entropy, (0, dims[1], None, 0))(x[:, None], many, bias, target[:, None])
        assert losses.shape == (5, 1)


def test_second_derivatives():
    x, weight, bias, target = (tensor.detach() for tensor in problem(3))
    found = hessian(lambda w: linear_cross_entropy(x, w, bias, target).sum())(weight)
    wanted = hessian(lambda w: F.cross_entropy(F.linear(x, w, bias), target, reduction="sum"))(weight)
    torch.testing.assert_close(found, wanted)
    leaf = x.requires_grad_()
    (first,) = torch.autograd.grad(linear_cross_entropy(leaf, weight, bias, target).sum(), leaf, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), leaf)[0].any()


@pytest.mark.slow
def test_compiled():
    inputs = problem(9, dtype=torch.float32)
    torch.testing.assert_close(torch.compile(linear_cross_entropy, fullgraph=True)(*inputs), twin(*inputs))


def test_a_model_called_by_function():
    layer = torch.nn.Linear(4, 7).double()
    x, _, _, target = problem(6)

    def loss(parameters):
        weight, bias = functional_call(_Parts(layer), parameters, ())
        return linear_cross_entropy(x, weight, bias, target).mean()

    parameters = {f"layer.{name}": p for name, p in layer.named_parameters()}
    torch.testing.assert_close(
        grad(loss)(parameters)["layer.weight"],
        torch.autograd.grad(F.cross_entropy(layer(x), target), layer.weight)[0],
    )


class _Parts(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self):
        return self.layer.weight, self.layer.bias


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({0: torch.zeros(9, 3)}, r"expected x of \(\.\.\., 4\)"),
        ({2: torch.zeros(6)}, r"expected bias of \(7,\), got \(6,\)"),
        ({2: torch.zeros(7, 1)}, r"expected bias of \(7,\), got \(7, 1\)"),
        ({3: torch.zeros(8, dtype=torch.int64)}, r"expected targets of shape \(9,\)"),
        ({3: torch.zeros(9)}, "float32"),
    ],
)
def test_bad_input_is_told(change, said):
    inputs = dict(enumerate(problem(9))) | change
    with pytest.raises(ValueError, match=said):
        linear_cross_entropy(*inputs.values())
