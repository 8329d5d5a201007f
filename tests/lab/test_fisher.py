"""The Fisher of every kind of layer and model, against one backward a sample."""

import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder_lab.continual import MultiHead, fisher
from neurocoder_lab.continual.large_memory import Rows


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def recoded(**options) -> nn.Module:
    model = plain()
    nc.recode(model, "*", **options)
    return model


def shared_memory() -> nn.Module:
    first = nc.Linear(6, 6, slots=3, heads=2)
    return nn.Sequential(first, nn.ReLU(), nc.Linear(6, 6, slots=3, heads=2, memory=first.memory), nn.Linear(6, 2))


def called_twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(6, 2))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 2, 2), nn.Flatten(), nn.ReLU(), nn.Linear(4, 3))


def several_rows() -> nn.Module:
    """Each sample is three rows of two features, seen by one layer as rows of their own."""
    rows = nn.Sequential(nn.Linear(2, 4), nn.ReLU())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.head = rows, nn.Linear(12, 3)

        def forward(self, x):
            return self.head(self.rows(x.reshape(-1, 2)).reshape(len(x), -1))

    return Model()


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    return model


class Own(nn.Module):
    """A forward of one's own over a layer and something else."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.inner = (forward,)

    def forward(self, x):
        return self.inner[0](self, x)


def frozen_first() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)
    return model


def weight_norm() -> nn.Module:
    model = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[0])
    return model


def used_functionally() -> nn.Module:
    return Own(lambda m, x: m.head(F.linear(m.fc(x).relu(), m.fc.weight)), fc=nn.Linear(6, 6), head=nn.Linear(6, 3))


def a_row_for_all() -> nn.Module:
    token = nn.Parameter(torch.randn(1, 4))
    return Own(lambda m, x: m.head(x * m.scale(m.token)), token=token, scale=nn.Linear(4, 6), head=nn.Linear(6, 3))


def routed_by_hand() -> nn.Module:
    def forward(model, x):
        y, first = torch.zeros(len(x), 3, dtype=x.dtype), x[:, 0] > 0
        for rows, expert in ((first, model.one), (~first, model.two)):
            if rows.any():
                y = y.index_put((rows.nonzero()[:, 0],), expert(x[rows]))
        return y

    return Own(forward, one=nn.Linear(6, 3), two=nn.Linear(6, 3))


def recurrent() -> nn.Module:
    def forward(model, x):
        return model.head(model.gru(x.view(len(x), 3, 2))[0][:, -1])

    return Own(forward, gru=nn.GRU(2, 4, batch_first=True), head=nn.Linear(4, 3))


def controlled(**options) -> nn.Module:
    """What decides looks at the same control for all samples."""

    def forward(model, x):
        with nc.controlled(model.inside, torch.ones(2, dtype=x.dtype)):
            return model.inside(x)

    return Own(forward, inside=recoded(control_features=2, **options))


def rows():
    """Heads that read the same row, and what they look at beside what they map."""
    chosen: dict = {"slots": 9, "heads": 5, "key_dim": 4, "top_k": 1, "one_choice": True, "addresses": "fixed"}
    model = nn.Sequential(Rows(6, 3, product_keys=True, sparse=True, **chosen))
    nn.init.normal_(model[0].layer.memory.right)
    return model


MODELS = {
    "first layer frozen": frozen_first,
    "weight norm": weight_norm,
    "weight used functionally": used_functionally,
    "one row for all samples": a_row_for_all,
    "routed by hand": routed_by_hand,
    "recurrent": recurrent,
    "experts, sparse": lambda: recoded(layer=nc.peers.MixtureOfExperts, experts=3, top_k=1),
    "plain": plain,
    "program": lambda: recoded(slots=4, heads=2, key_dim=3),
    "program, reading": lambda: recoded(slots=4, heads=2, key_dim=3, controller_sees="read"),
    "program, reading, residual": lambda: recoded(slots=4, heads=2, residual=True, controller_sees="read"),
    "program, authors": lambda: recoded(slots=4, heads=2, key_dim=3, compat="authors"),
    "program, free keys": lambda: recoded(slots=4, heads=2, rules=nc.Rules(free_keys=("left", "values"))),
    "program, several steps": lambda: recoded(slots=4, heads=2, key_dim=3, steps=2, least_used=1),
    "program, residual": lambda: recoded(slots=4, heads=2, residual=True),
    "program, few slots": lambda: recoded(slots=6, heads=2, top_k=2),
    "program, sparse": lambda: recoded(slots=30, heads=2, top_k=2, sparse=True),
    "program, sparse, fixed": lambda: recoded(
        slots=30, heads=2, top_k=1, one_choice=True, addresses="fixed", sparse=True
    ),
    "program, fixed, of two": lambda: recoded(slots=30, heads=2, top_k=2, addresses="fixed"),
    "rows": rows,
    "program, product keys": lambda: recoded(slots=9, heads=2, key_dim=4, top_k=2, product_keys=True, sparse=True),
    "stored programs": lambda: recoded(layer=nc.peers.StoredProgramMemory, programs=3, key_dim=4),
    "stored programs, controlled": lambda: controlled(layer=nc.peers.StoredProgramMemory, programs=3),
    "program, controlled": lambda: controlled(slots=4, heads=2),
    "low rank": lambda: recoded(layer=nc.peers.LowRank, rank=2),
    "experts": lambda: recoded(layer=nc.peers.MixtureOfExperts, experts=3, top_k=2, dispatch="dense"),
    "normalised": lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3)),
    "convolution": convolution,
    "in place": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
    "several rows a sample": several_rows,
    "memory shared by two layers": shared_memory,
    "layer called twice": called_twice,
    "weights tied": tied,
}


def slow_fisher(model, x, outputs=None, y=None, extra=None):
    """One backward a sample."""
    outputs = outputs or model
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    modes = model.training
    model.eval()
    for i in range(len(x)):
        model.zero_grad()
        logits = outputs(x[i : i + 1])
        loss = F.cross_entropy(logits, logits.argmax(-1) if y is None else y[i : i + 1])
        (loss if extra is None else loss + extra()).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] += p.grad.to_dense().square() / len(x)
    model.zero_grad()
    model.train(modes)
    return total


def close(given, wanted) -> None:
    assert given.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(given[name], wanted[name], rtol=1e-9, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", MODELS)
def test_the_fisher_is_that_of_one_backward_a_sample(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    x = torch.randn(11, 6, dtype=torch.float64)
    before = {name: p.clone() for name, p in model.named_parameters()}
    close(fisher(model, x), slow_fisher(model, x))
    y = torch.randint(2, (11,))
    close(fisher(model, x, y=y), slow_fisher(model, x, y=y))
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert model.training


def test_heads_of_other_tasks_have_no_information_and_frozen_weights_none():
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), [nn.Linear(5, 2), nn.Linear(5, 3)]).double()
    model.body[0].weight.requires_grad_(False)
    x = torch.randn(5, 6, dtype=torch.float64)
    ours = fisher(model, x, lambda x: model(x, 1))
    assert "body.0.weight" not in ours
    assert not ours["heads.0.weight"].any()
    close(ours, slow_fisher(model, x, lambda x: model(x, 1)))
    with pytest.raises(ValueError, match="needs samples"):
        fisher(model, x[:0])
    with pytest.raises(ValueError, match="no parameter that is trained"):
        fisher(model.requires_grad_(False), x, lambda x: model(x, 1))


def test_the_fisher_under_autocast_is_nearly_that_without():
    torch.manual_seed(0)
    model, x = recoded(slots=4, heads=2), torch.randn(20, 6)

    def half(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    exact, ours = fisher(model, x), fisher(model, x, half)
    assert all(p.dtype == torch.float32 for p in ours.values())
    for name, wanted in exact.items():
        assert (ours[name] - wanted).abs().max() < 0.3 * wanted.max(), name


@given(seed=st.integers(0, 1000), rows=st.integers(1, 6), classes=st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_the_closed_form_of_a_program_layer_for_any_size(seed, rows, classes):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, classes)).double()
    nc.recode(model, "*", slots=1 + seed % 4, heads=1 + seed % 3, key_dim=1 + seed % 2, sharpness=1.0)
    x = torch.randn(rows, 3, dtype=torch.float64)
    close(fisher(model, x), slow_fisher(model, x))


def test_the_fisher_refuses_what_is_no_classifier():
    model, x = plain(), torch.randn(4, 6)
    for outputs, said in (
        (lambda x: model(x)[:, 0], "logits"),
        (lambda x: model(x).detach(), "without a gradient"),
        (lambda x: model(x).argmax(-1), "logits"),
        (plain(), "another model's"),
    ):
        with pytest.raises(ValueError, match=said):
            fisher(model, x, outputs)
    with pytest.raises(ValueError, match="4 samples and 3 labels"):
        fisher(model, x, y=torch.zeros(3).long())
    with pytest.raises(ValueError, match="outputs of one task"):
        fisher(model, x, MultiHead(model, [nn.Linear(3, 2)]))
    for row in (0, 3):
        bad = x.clone()
        bad[row] = float("nan")
        with pytest.raises(ValueError, match="not finite"):
            fisher(model, bad)


@pytest.mark.parametrize("kind", ["program", "stored programs", "convolution", "first layer frozen"])
def test_a_loss_that_all_samples_share_counts_in_each(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    x = torch.randn(11, 6, dtype=torch.float64)
    first = next(p for p in model.parameters() if p.requires_grad)

    def extra():
        return first.square().sum() + first.sum()

    close(fisher(model, x, extra=extra), slow_fisher(model, x, extra=extra))


def test_a_model_without_memories_has_no_orthogonal_loss():
    model, x = plain(), torch.randn(11, 6)
    assert nc.orthogonality(model) == 0
    close(fisher(model, x, extra=lambda: 10 * nc.orthogonality(model)), fisher(model, x))


class Reused(nn.Module):
    """A weight that is used beside its layer as well."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.layer(x) + x.square() @ self.layer.weight.t()


def test_a_blank_first_sample_hides_no_other_use_of_a_weight():
    torch.manual_seed(0)
    model, x = Reused().double(), torch.randn(11, 6, dtype=torch.float64)
    x[0] = 0
    close(fisher(model, x), slow_fisher(model, x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_a_blank_first_sample_hides_no_weight(norm):
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(6, 5, bias=False)), nn.ReLU(), nn.Linear(5, 3)).double().eval()
    x = torch.randn(11, 6, dtype=torch.float64)
    x[0] = 0
    close(fisher(model, x), slow_fisher(model, x))


def test_rows_that_were_looked_up_before_have_the_same_fisher(monkeypatch):
    monkeypatch.setattr(sys.modules["neurocoder_lab.continual.fisher"], "_sample_by_sample", None)
    model, x = rows().double(), torch.randn(11, 6, dtype=torch.float64)
    close(fisher(model, model[0].look(x)), fisher(model, x))


CLOSED = [
    "plain", "program", "program, reading", "program, authors", "program, free keys", "program, sparse, fixed",
    "program, fixed, of two", "rows", "stored programs",
]  # fmt: skip


@pytest.mark.parametrize("kind", CLOSED)
def test_layers_with_a_closed_form_need_no_gradient_of_a_single_sample(kind, monkeypatch):
    monkeypatch.setattr(sys.modules["neurocoder_lab.continual.fisher"], "_sample_by_sample", None)
    fisher(MODELS[kind](), torch.randn(11, 6))
