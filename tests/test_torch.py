"""The layers under everything PyTorch offers: compile, export, autocast, dtypes, copies, meta, torch.func."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

import neurocoder as nc

SETTINGS = {
    "one step": {"heads": 3},
    "several steps": {"steps": 3, "heads": 2, "least_used": 2},
    "residual": {"steps": 3, "heads": 2, "least_used": 2, "residual": True},
    "reading": {"steps": 3, "heads": 2, "least_used": 2, "residual": True, "controller_sees": "read"},
    "authors": {"steps": 3, "heads": 2, "least_used": 2, "residual": True, "compat": "authors"},
    "few slots": {"heads": 3, "top_k": 2},
}


@pytest.fixture(params=SETTINGS)
def layer(request) -> nc.Linear:
    torch.manual_seed(0)
    return nc.Linear(12, 6, slots=5, key_dim=3, **SETTINGS[request.param])


@pytest.fixture(params=SETTINGS)
def conv(request) -> nc.Conv2d:
    torch.manual_seed(0)
    return nc.Conv2d(4, 6, 3, padding=1, slots=5, key_dim=3, **SETTINGS[request.param])


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    # float32, another order of summation; the authors' rules multiply singular values up to tens
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def compiled_equals_eager(module: nn.Module, x: torch.Tensor, backend: str = "inductor") -> None:
    torch._dynamo.reset()
    module, x = module.double(), x.double()  # in float32 a slot on the border of the least used may change sides
    wanted, found = [], []
    for network, into in ((module, wanted), (torch.compile(module, fullgraph=True, backend=backend), found)):
        module.zero_grad()
        y = network(x)
        (y.square().sum() + nc.orthogonality(module)).backward()
        into += [y.detach(), *(p.grad.clone() for p in module.parameters())]
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


@pytest.mark.slow
def test_compile(layer):
    compiled_equals_eager(layer, torch.randn(4, 12))


@pytest.mark.slow
def test_compile_convolution(conv):
    compiled_equals_eager(conv, torch.randn(2, 4, 8, 8), backend="aot_eager")  # the same graphs, quicker to build


@pytest.mark.slow
def test_trace_through_compile(layer):
    torch._dynamo.reset()
    model = nn.Sequential(nn.ReLU(), layer)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 12)
    compiled(x)
    with nc.trace(compiled) as seen:
        compiled(x)
    with nc.trace(model) as plain:
        model(x)
    close(seen["1"].left, plain["1"].left)


@pytest.mark.slow
def test_export_with_dynamic_batch(layer):
    batch = torch.export.Dim("batch")
    exported = torch.export.export(layer.eval(), (torch.randn(4, 12),), dynamic_shapes=({0: batch},))
    x = torch.randn(9, 12)
    close(exported.module()(x), layer(x))


@pytest.mark.slow
def test_export_convolution_with_dynamic_batch(conv):
    batch = torch.export.Dim("batch")
    exported = torch.export.export(conv.eval(), (torch.randn(3, 4, 8, 8),), dynamic_shapes=({0: batch},))
    x = torch.randn(5, 4, 8, 8)
    close(exported.module()(x), conv(x))


@pytest.mark.slow
def test_onnx_runtime_agrees(layer, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "layer.onnx"
    x = torch.randn(4, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            layer.eval(), (x,), file, dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False
        )
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    x = torch.randn(9, 12)
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    close(torch.from_numpy(y), layer(x).detach())


def test_autocast(layer):
    x = torch.randn(64, 12)
    wanted = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        (
            y.float().square().sum() + nc.orthogonality(layer)
        ).backward()  # inside the region, where a backward does not belong but may be called
    assert y.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    # bfloat16 has 8 bits, and a slot on the border of the least used may change sides
    assert (y - wanted).abs().median() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(layer, dtype):
    x = torch.randn(8, 12)
    other = copy.deepcopy(layer).to(dtype)
    y = other(x.to(dtype))
    assert y.dtype == dtype
    assert (y.float() - layer(x)).abs().median() < 0.02 * layer(x).abs().max()


def test_a_copy_shares_nothing(layer):
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 12)
    assert torch.equal(twin(x), layer(x))
    with torch.no_grad():
        twin.memory.left.add_(1)
    assert not torch.allclose(twin(x), layer(x))


def test_state_dict_round_trip(layer):
    torch.manual_seed(1)
    twin = copy.deepcopy(layer)
    twin.reset_parameters()
    x = torch.randn(4, 12)
    assert not torch.allclose(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_meta_device_then_real(setting):
    layer = nc.Linear(12, 6, slots=5, device="meta", **setting)
    assert layer(torch.randn(3, 12, device="meta")).shape == (3, 6)
    conv = nc.Conv2d(4, 6, 3, slots=5, device="meta", **setting)
    assert conv(torch.randn(3, 4, 8, 8, device="meta")).shape == (3, 6, 6, 6)
    layer.to_empty(device="cpu").reset_parameters()
    assert layer(torch.randn(3, 12)).isfinite().all()


def test_empty_batch(layer, conv):
    y = layer(torch.randn(0, 12))
    assert y.shape == (0, 6)
    y.sum().backward()
    assert layer(torch.randn(2, 0, 12)).shape == (2, 0, 6)
    assert layer.program(torch.randn(0, 12)).shape == (0, 12, 6)
    assert conv(torch.randn(0, 4, 8, 8)).shape == (0, 6, 8, 8)
    with nc.trace(layer) as seen:
        layer(torch.randn(0, 12))
    assert seen[""].left.shape[0] == 0


@pytest.mark.parametrize("lead", [(), (1,), (2, 3)])
def test_any_leading_shape(layer, lead):
    x = torch.randn(*lead, 12)
    assert layer(x).shape == (*lead, 6)
    one_by_one = torch.stack([layer(row) for row in x.reshape(-1, 12)]).reshape(*lead, 6)
    close(layer(x), one_by_one)


def test_unbatched_image(conv):
    x = torch.randn(4, 8, 8)
    close(conv(x), conv(x[None])[0])


def test_per_sample_gradients(layer):
    """vmap over grad through the fast path, against one backward a sample."""
    layer = layer.double()
    x = torch.randn(4, 12, dtype=torch.float64)
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())

    def loss(parameters, row):
        return functional_call(layer, (parameters, buffers), (row[None],)).square().sum()

    parameters = {name: p for name, p in parameters.items() if "columns" not in name}  # only the loss sees those
    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, row in enumerate(x):
        layer.zero_grad()
        layer(row[None]).square().sum().backward()
        for name, parameter in parameters.items():
            torch.testing.assert_close(each[name][i], parameter.grad, rtol=1e-9, atol=1e-9)


def test_an_ensemble_by_vmap_over_parameters(layer):
    x = torch.randn(4, 12)
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    scaled = {name: torch.stack((p, 1.1 * p)).detach() for name, p in parameters.items()}
    together = vmap(lambda p: functional_call(layer, (p, buffers), (x,)))(scaled)
    for i in range(2):
        alone = functional_call(layer, ({name: p[i] for name, p in scaled.items()}, buffers), (x,))
        close(together[i], alone)


def test_higher_derivatives():
    """The Hessian by forward over reverse, and a backward through a backward, against plain functions."""
    torch.manual_seed(0)
    layer = nc.Linear(5, 3, slots=4, key_dim=2, steps=3, least_used=2, dtype=torch.float64)
    x = torch.randn(5, dtype=torch.float64)

    def loss(x):
        return layer(x).square().sum()

    numeric = jacrev(lambda x: grad(loss)(x))(x)
    torch.testing.assert_close(hessian(loss)(x), numeric)
    assert torch.autograd.gradcheck(layer, x[None].clone().requires_grad_())
    assert torch.autograd.gradgradcheck(layer, x[None].clone().requires_grad_())


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_one_step_of_the_optimiser_moves_every_parameter(steps, residual):
    torch.manual_seed(0)
    model = nn.Sequential(
        nc.Conv2d(2, 4, 3, slots=6, heads=2, steps=steps, least_used=2, residual=residual),
        nn.Flatten(),
        nc.Linear(64, 8, slots=6, heads=2, steps=steps, least_used=2, residual=residual),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimiser = torch.optim.Adam(model.parameters())
    loss = nn.functional.cross_entropy(model(torch.randn(16, 2, 6, 6)), torch.randint(8, (16,)))
    (loss + 0.1 * nc.orthogonality(model)).backward()
    optimiser.step()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), f"{name} did not move"
