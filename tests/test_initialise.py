"""How a fresh layer starts: variance, components that differ, gradients. benchmarks/initialisation.py looks wider."""

import pytest
import torch
from torch import nn

import neurocoder as nc

SHAPES = [(1, 1), (1, 15), (2, 1), (5, 1), (5, 3)]  # steps, heads


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(("steps", "heads"), SHAPES)
@pytest.mark.parametrize(
    ("width", "sees"),
    [
        *[(8, "input"), (64, "input"), (8, "read"), (64, "read")],
        *(pytest.param(*wide, marks=pytest.mark.slow) for wide in [(1000, "input"), (2000, "input"), (1000, "read")]),
    ],
)
def test_a_fresh_layer(width, sees, steps, heads, usage, residual):
    for slots, key_dim in [(30, 5)] if width > 100 else [(2, 2), (5, 16), (30, 5), (100, 2)]:
        torch.manual_seed(width + slots)
        least_used = max(1, slots // 4) if usage else 0
        layer = nc.Linear(
            width, width, slots=slots, key_dim=key_dim, steps=steps, heads=heads, least_used=least_used,
            residual=residual, controller_sees=sees,
        )  # fmt: skip
        x = torch.randn(256, width)
        y = layer(x)
        ratio = (y.var() / nn.Linear(width, width)(x).var()).item()
        assert 0.5 < ratio < 2, f"variance ratio {ratio:.2f} with {slots} slots"
        if steps * heads > 1:
            similarity = nc.diagnose(layer, x[:32])[""].similarity
            assert similarity < 0.9, f"components alike: {similarity:.2f} with {slots} slots, key_dim {key_dim}"
        (y - torch.randn_like(y)).square().mean().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name


def test_convolution_has_the_variance_of_a_plain_one():
    torch.manual_seed(0)
    x = torch.randn(32, 8, 12, 12)
    for residual in (False, True):
        for sees in ("input", "read"):
            layer = nc.Conv2d(8, 16, 3, slots=10, heads=5, residual=residual, controller_sees=sees)
            ratio = (layer(x).var() / nn.Conv2d(8, 16, 3)(x).var()).item()
            assert 0.5 < ratio < 2


def test_a_reading_controller_is_small():
    model = nn.Sequential(nn.Linear(768, 768))
    nc.recode(model, "0", base="frozen", slots=16, heads=8, controller_sees="read")
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 30_567  # 120,807 with the full one


def test_a_seed_decides_everything_and_probing_takes_no_random_numbers():
    layers = []
    for _ in range(2):
        torch.manual_seed(3)
        layers.append(nc.Linear(10, 4, slots=5, steps=2, least_used=2))
    for a, b in zip(layers[0].state_dict().values(), layers[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)


SIZES = [  # as the authors' code has them; the 88 are a map that it builds and never calls
    pytest.param([(16, 1)], {"slots": 10, "heads": 15, "key_dim": 3}, nn.GRU(2, 16), 3600, id="polynomial single-step"),
    pytest.param(
        [(8, 1)], {"slots": 20, "steps": 5, "key_dim": 3, "least_used": 2}, nn.GRU(2, 8), 2150 - 88,
        id="polynomial multi-step",
    ),
    pytest.param(
        [(1024, 256), (256, 256), (256, 2)], {"slots": 50, "heads": 10, "key_dim": 5, "least_used": 5}, None, 348_083,
        id="Split MNIST",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("widths", "options", "beside", "published"), SIZES)
def test_sizes_of_the_authors_models(widths, options, beside, published):
    layers = nn.ModuleList([nc.Linear(*width, compat="authors", **options) for width in widths])
    count = sum(p.numel() for p in layers.parameters()) + (sum(p.numel() for p in beside.parameters()) if beside else 0)
    # Their layers also hold a residual gate that nothing reads where there is no residual program.
    unread = sum(width[0] + 1 for width in widths) if options.get("steps", 1) == 1 else 0
    assert count + unread == published
    assert abs(count / published - 1) < 0.01
