"""`nc.cached`: the same results, nothing stale; and inference on few rows against the slow twin."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import neurocoder as nc
from neurocoder.program.kernel import lean
from tests import reference
from tests.strategies import options, shake

KINDS = [
    {"heads": 3},
    {"heads": 3, "controller_sees": "read"},
    {"steps": 3, "heads": 2, "least_used": 2, "residual": True},
    {"steps": 3, "heads": 2, "least_used": 2, "controller_sees": "read", "residual": True},
]


@settings(max_examples=60, deadline=None)
@given(options=options(), seed=st.integers(0, 10**6), rows=st.sampled_from([0, 1, 3]))
def test_inference_equals_the_slow_twin(options, seed, rows):
    torch.manual_seed(seed)
    layer = shake(nc.Linear(5, 4, **options))
    x = torch.randn(rows, 5, dtype=torch.float64)
    with torch.no_grad(), nc.cached(layer):
        for _ in range(2):
            y = layer(x)
            slow = reference.linear(layer, x) if rows else torch.zeros(0, 4, dtype=torch.float64)
            torch.testing.assert_close(y, slow, rtol=1e-9, atol=1e-9)


def model(**options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nc.Conv2d(2, 3, 3, slots=4, key_dim=3, **options),
        nn.Flatten(),
        nc.Linear(12, 6, slots=5, key_dim=3, **options),
        nc.Linear(6, 4, slots=5, key_dim=3, **options),
    )


CHANGES = {
    "in place": lambda m: m[2].memory.left.mul_(1.5),
    "a key": lambda m: m[3].memory.values_key_bias.add_(1.0),
    "the controller": lambda m: m[2].controller.weight.mul_(-1.0),
    "the gain": lambda m: m[2].gain.mul_(2.0),
    "the bias": lambda m: m[2].bias.add_(1.0),
    "replaced": lambda m: setattr(m[2].memory, "right", nn.Parameter(2 * m[2].memory.right)),
    "data replaced": lambda m: setattr(m[2].memory.right, "data", 2 * m[2].memory.right),
    "data replaced twice": lambda m: [setattr(m[2].memory.left, "data", f * m[2].memory.left) for f in (2, 3)],
    "another memory": lambda m: (
        setattr(m[2], "memory", copy.deepcopy(m[2].memory).requires_grad_(False)) or shake(m[2])
    ),
    "loaded": lambda m: m.load_state_dict({name: 1.1 * tensor for name, tensor in m.state_dict().items()}),
    "moved": lambda m: m.to(torch.float64),
}


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows", [4, 80])
def test_a_changed_parameter_is_seen(kind, change, rows):
    network, x = model(**KINDS[kind]), torch.randn(rows, 2, 4, 4)
    with torch.no_grad(), nc.cached(network):
        before = network(x)
        torch.testing.assert_close(network(x), before)
        CHANGES[change](network)
        x = x.to(network[2].own_dtype())
        found = network(x)
    with torch.no_grad():
        torch.testing.assert_close(found, network(x))
    assert change == "moved" or not torch.allclose(found, before, rtol=1e-4, atol=1e-4)


def test_changed_rows_of_a_sparse_memory_are_seen():
    torch.manual_seed(0)
    layer = nc.Linear(6, 5, slots=40, heads=2, top_k=2, one_choice=True, sparse=True)
    x, tables = torch.randn(8, 6), [*layer.memory.children()]
    assert len(tables) == 4  # left, right, values, keys
    for table in tables:
        with torch.no_grad(), nc.cached(layer):
            before = layer(x)
            table.weight.copy_(torch.randn_like(table.weight))
            found = layer(x)
        with torch.no_grad():
            torch.testing.assert_close(found, layer(x))
        assert not torch.allclose(found, before, rtol=1e-4, atol=1e-4)


def test_what_is_kept_is_used_and_gone_afterwards(monkeypatch):
    network, x = model(heads=3), torch.randn(4, 2, 4, 4)
    calls, honest = [], nc.ProgramMemory.keys
    monkeypatch.setattr(nc.ProgramMemory, "keys", lambda self: calls.append(1) or honest(self))
    with torch.no_grad(), nc.cached(network):
        for _ in range(3):
            network(x)
        assert len(calls) == 3  # one for each layer
        twin = copy.deepcopy(network)
        twin(x)
        assert len(calls) == 6  # a copy keeps nothing
        with nc.cached(network):
            network(x)
        assert len(calls) == 9  # a block of its own
        network(x)
        assert len(calls) == 9
    with torch.no_grad():
        network(x)
    assert len(calls) == 12
    assert all(layer._kept is None for layer in network.modules() if hasattr(layer, "_kept"))


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_gradients_are_as_without_it(kind):
    network, x = model(**KINDS[kind]), torch.randn(4, 2, 4, 4)
    found = []
    for block in (nc.cached(network), nc.cached(nn.Identity())):
        with block:
            with torch.no_grad():
                network(x)
            network.zero_grad()
            network(x).square().sum().backward()
            found.append([p.grad.clone() for p in network.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
        assert a.any()


def stepped(layer: nc.Linear, x: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """A recurrent network: the same layer again and again."""
    for _ in range(steps):
        x = layer(x).tanh()
    return x


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_time_steps_share_keys_and_their_gradients(kind, monkeypatch):
    torch.manual_seed(0)
    layer, x = nc.Linear(6, 6, slots=5, key_dim=3, **KINDS[kind]).double(), torch.randn(4, 6, dtype=torch.float64)
    calls, honest = [], nc.ProgramMemory.keys
    monkeypatch.setattr(nc.ProgramMemory, "keys", lambda self: calls.append(1) or honest(self))
    found = []
    for block, made in ((nc.cached(layer, unrolled=True), 1), (nc.cached(layer), 3)):
        layer.zero_grad()
        with block:
            y = stepped(layer, x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
        assert len(calls) == made
        calls.clear()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_time_steps_keep_nothing_stale_and_no_graph_where_none_is_wanted():
    torch.manual_seed(0)
    layer, x = nc.Linear(6, 6, slots=5, heads=2), torch.randn(4, 6)
    with nc.cached(layer, unrolled=True):
        with torch.no_grad():
            stepped(layer, x)
        stepped(layer, x).sum().backward()
        assert all(parameter.grad.any() for parameter in layer.parameters())
        with pytest.raises(RuntimeError, match="second time"):
            stepped(layer, x).sum().backward()
        with torch.no_grad():
            layer.memory.left_key_bias.add_(1.0)
        changed = stepped(layer, x)
    torch.testing.assert_close(changed, stepped(layer, x))


@pytest.mark.slow
def test_under_compile_torch_func_inference_mode_and_autocast():
    network, x = model(heads=3), torch.randn(4, 2, 4, 4)
    with torch.no_grad(), nc.cached(network):
        y = network(x)
        with torch.inference_mode():
            torch.testing.assert_close(network(x), y)
        torch.testing.assert_close(torch.func.vmap(lambda one: network(one[None])[0])(x), y, rtol=1e-4, atol=1e-5)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(network, backend="eager", fullgraph=True)(x), y, rtol=1e-4, atol=1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert network(x).dtype == torch.bfloat16
        doubled = {name: 2 * p for name, p in network.named_parameters()}
        twin = model_with(network, doubled)  # it has no gradients to take: it computes by other operations
        called = torch.func.functional_call(network, doubled, (x,))
        torch.testing.assert_close(called, twin(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(network(x), y)


def model_with(network: nn.Module, parameters: dict[str, torch.Tensor]) -> nn.Module:
    twin = copy.deepcopy(network)
    twin.load_state_dict(parameters, strict=False)
    return twin


def test_what_it_refuses():
    with pytest.raises(TypeError, match=r"takes an nn.Module, got function"), nc.cached(lambda x: x):
        pass
    with torch.inference_mode():
        made = nc.Linear(4, 3, slots=2)
    with pytest.raises(ValueError, match=r"made under torch\.inference_mode"), nc.cached(made):
        pass
    assert made._kept is None


def test_few_rows_take_the_lean_way_and_a_wrong_one_would_show(monkeypatch):
    layer, x = nc.Linear(6, 5, slots=4, heads=2), torch.randn(3, 6)
    wanted = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), wanted)
        torch.testing.assert_close(layer(x.expand(100, 3, 6))[0], wanted)  # many rows, or another shape, do not
        honest = lean.run
        monkeypatch.setattr(lean, "run", lambda *given: 1.01 * honest(*given))
        assert not torch.allclose(layer(x), wanted)
        torch.testing.assert_close(layer(x.expand(100, 3, 6))[0], wanted)
        with nc.trace(layer) as seen:
            layer(x)
        assert seen[""].left.shape == (3, 2, 4)
    torch.testing.assert_close(layer(x), wanted)
    with torch.no_grad(), pytest.raises(ValueError, match=r"x of shape \(\.\.\., 6\), got \(2, 7\)"):
        layer(torch.randn(2, 7))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimiser_is_seen(kind, fused):
    network, x = nn.Sequential(nc.Linear(6, 4, slots=3, heads=2)), torch.randn(5, 6)
    optimiser = kind(network.parameters(), lr=0.1, fused=fused)
    with nc.cached(network):
        with torch.no_grad():
            network(x)
        network(x).square().sum().backward()
        optimiser.step()
        with torch.no_grad():
            y = network(x)
    with torch.no_grad():
        torch.testing.assert_close(y, network(x))


def test_a_stored_model_keeps_nothing():
    network = nc.Linear(6, 4, slots=3)
    with nc.cached(network):
        assert copy.deepcopy(network)._kept is None
        assert network._kept.__reduce__() == (type(None), ())
