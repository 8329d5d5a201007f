"""The polynomial experiment: its data, its heads, and the number for Fig 5."""

import pytest
import torch

from neurocoder_lab.experiments import polynomial
from neurocoder_lab.experiments.polynomial import SETTINGS, Polynomial
from neurocoder_lab.run import execute, folder_of

SIZES = {"linear": 3489, "hypernet": 3529, "film": 3555, "neurocoder-single": 3600, "neurocoder-multi": 2100}


@pytest.mark.parametrize("chunks", [4, 8])
def test_every_chunk_is_a_polynomial(chunks):
    x, y = polynomial.sequences(50, chunks, 0.0, torch.Generator().manual_seed(0))
    assert x.shape == (50, 40, 2)
    assert y.shape == (50, 40)
    torch.testing.assert_close(x[0, :, 0], torch.linspace(-5, 5, 40))
    assert not x[:, 0, 1].any()
    assert torch.equal(x[:, 1:, 1], y[:, :-1])
    torch.testing.assert_close(y.abs().amax(1), torch.ones(50))
    points = 40 // chunks
    for chunk in range(chunks if points > 11 else 0):
        place = slice(chunk * points, (chunk + 1) * points)
        basis = x[0, place, :1].double() ** torch.arange(11)
        rest = torch.linalg.lstsq(basis, y[:, place].double().t()).residuals
        assert rest.abs().max() < 1e-6


def test_noise_has_the_variance_asked_for():
    clean, noisy = (polynomial.sequences(2000, 4, n, torch.Generator().manual_seed(0))[1] for n in (0.0, 0.3))
    assert (noisy - clean).var() == pytest.approx(0.3, rel=0.02)


@pytest.mark.parametrize("model", SIZES)
def test_heads_have_the_papers_sizes(model):
    size = sum(p.numel() for p in polynomial.build(model).parameters())
    assert 0.85 * SIZES[model] < size < 1.02 * SIZES[model]  # ours lack what the authors' never use


def test_attention_changes_are_told_from_noise():
    torch.manual_seed(0)
    model = polynomial.build("neurocoder-multi")
    x, _ = polynomial.sequences(64, 4, 0.0)
    changes = polynomial.attention_changes(model, x, 4)
    assert changes["boundary_ratio"] == pytest.approx(changes["change_at_boundaries"] / changes["change_inside"])
    steps = x.clone()  # a GRU without memory of its own sees a jump where its input jumps
    steps[..., 0], steps[..., 1] = 0, torch.arange(40).div(10, rounding_mode="floor") * 3.0
    with torch.no_grad():
        model.gru.weight_hh_l0.zero_()
        model.gru.bias_hh_l0.zero_()
        for gate in (model.gru.weight_ih_l0, model.gru.bias_ih_l0):
            gate[8:16] -= 50  # the update gate is shut: the state is the candidate
    assert polynomial.attention_changes(model, steps, 4)["boundary_ratio"] > 100


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_smoke_run_learns(tmp_path, setting):
    config = Polynomial(budget="smoke", model="film", setting=setting)
    final = execute(polynomial.EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert final["test"] < 1.1 * final["target_variance"]
    assert {*polynomial.EXPERIMENT.metrics} - {"boundary_ratio"} <= final.keys()  # that one is the Neurocoders'
    rows = (folder_of(polynomial.EXPERIMENT, config, tmp_path) / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 50
