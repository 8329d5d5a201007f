"""EM, REINFORCE and noisy top-k: what each step promises, checkpoints, and small problems they solve."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

import neurocoder as nc
from neurocoder import modular
from neurocoder.modular import route as route_module
from neurocoder.modular.route import Given, routed
from neurocoder.modular.training import NoisyTopK, Reinforce, ViterbiEM, classification, gaussian


class Sequence(nn.Module):
    """A model with choices per time step, and one a time step outside of the recurrence."""

    def __init__(self):
        super().__init__()
        self.gru = modular.GRU(3, 4, batch_first=True, modules=3)
        self.drop = nn.Dropout(0.5)
        self.head = modular.Linear(4, 5, modules=2)

    def forward(self, x):
        return self.head(self.drop(self.gru(x)[0]))


def problem(kind: str):
    torch.manual_seed(0)
    if kind == "sequences":
        model, x, y = Sequence(), torch.randn(30, 6, 3), torch.randint(5, (30, 6))
        return model.double(), x.double(), y, classification
    if kind == "classification":
        model = nn.Sequential(modular.Linear(4, 8, modules=3, choices=2, activation="relu"), nn.Dropout(0.5))
        model.append(modular.Linear(8, 3, modules=4))
        return model.double(), torch.randn(30, 4).double(), torch.randint(3, (30,)), classification
    model = nn.Sequential(modular.Linear(4, 2, modules=3))
    return model.double(), torch.randn(30, 4).double(), torch.randn(30, 2).double(), gaussian(0.1)


KINDS = ["classification", "regression", "sequences"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_e_step_never_lowers_the_objective_and_stores_what_it_says(kind):
    model, x, y, likelihood = problem(kind)
    em = ViterbiEM(model, likelihood, size=30, samples=4)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)

    def objective():
        model.eval()
        with torch.no_grad(), routed(model, Given(em.choices)) as route:
            value = likelihood(model(x), y) + route.log_prob
        model.train()
        return value

    raised = 0
    for _ in range(12):
        index = torch.randperm(30)[:12]
        em.loss(x[index], y[index], index).backward()  # draws the choices of all data points at first
        before, stored = objective(), em.choices.clone()
        told = em.expect(x[index], y[index], index)
        after = objective()
        assert (after >= before - 1e-12).all()
        torch.testing.assert_close(after[index], told)
        others = torch.ones(30, dtype=torch.bool)
        others[index] = False
        assert torch.equal(stored[others], em.choices[others])
        raised += int((after > before + 1e-9).sum())
        optimiser.step()
        optimiser.zero_grad()
    assert raised > 10
    assert model.training


class States(nn.Module):
    """Sequences, each from a state of its own, or from states as `nn.GRU` takes them: data points second."""

    def __init__(self):
        super().__init__()
        self.gru = modular.GRU(3, 4, batch_first=True, modules=3)

    def forward(self, x, h):
        return self.gru(x, h if h.dim() == 3 else h[None])[0]


def one_by_one(em, x, y, h, stored, samples):
    """Eq. 11 as a loop over data points and their candidates: which is best, and its logarithm."""
    chosen, values = [], []
    for n in range(len(x)):
        best = None
        for path in (stored[n], *samples[:, n]):
            with torch.no_grad(), routed(em.model, Given(path[None])) as route:
                value = (em.log_likelihood(em.model(x[n : n + 1], h[n : n + 1]), y[n : n + 1]) + route.log_prob).item()
            if best is None or value > best:
                best, kept = value, path
        chosen.append(kept)
        values.append(best)
    return torch.stack(chosen), values


@pytest.mark.parametrize("states_second", [False, True])
def test_an_e_step_takes_the_best_of_what_it_tried(states_second, monkeypatch):
    torch.manual_seed(0)
    model = States().double()
    x, h, y = torch.randn(20, 6, 3).double(), torch.rand(20, 4).double(), torch.randn(20, 6, 4).double()
    em, drawn, batches = ViterbiEM(model, gaussian(), size=20, samples=5), [], []
    draw = route_module.draw
    monkeypatch.setattr(route_module, "draw", lambda log_p: drawn.append(draw(log_p)) or drawn[-1])
    model.register_forward_pre_hook(lambda module, inputs: batches.append(len(inputs[0])))
    index = torch.arange(20)
    for _ in range(3):
        em.loss((x, h), y, index)
        stored = em.choices.clone()
        drawn.clear()
        batches.clear()
        value = em.expect((x, h[None] if states_second else h), y, index)
        assert batches == ([20] * 6 if states_second else [120])
        by_step = torch.stack([chosen.flatten() for chosen in drawn])  # all samples of a step, or a step of a sample
        by_step = by_step.view(5, 6, 20).transpose(0, 1) if states_second else by_step.view(6, 5, 20)
        chosen, wanted = one_by_one(em, x, y, h, stored, by_step.permute(1, 2, 0))
        assert torch.equal(em.choices, chosen.to(em.choices))
        torch.testing.assert_close(value, torch.tensor(wanted).double())
        assert not torch.equal(em.choices, stored)


def test_the_first_choices_are_uniform():
    model, x, y, likelihood = problem("classification")
    em = ViterbiEM(model, likelihood, size=6000)
    em.loss(x, y, torch.arange(30))
    assert em.choices.shape == (6000, 3)
    assert em.modules.tolist() == [3, 3, 4]
    for column, modules in zip(em.choices.t(), em.modules, strict=True):
        share = torch.bincount(column.long(), minlength=int(modules)) / 6000
        assert (share - 1 / modules).abs().max() < 0.025


@pytest.mark.parametrize("kind", KINDS)
def test_the_m_step_is_the_gradient_of_equation_8(kind):
    model, x, y, likelihood = problem(kind)
    model.eval()
    em = ViterbiEM(model, likelihood, size=30)
    index = torch.tensor([3, 7, 4])
    em.loss(x[index], y[index], index).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    total = 0
    for n in index:
        with routed(model, Given(em.choices[n : n + 1])) as route:
            total = total + likelihood(model(x[n : n + 1]), y[n : n + 1]).sum() + route.log_prob.sum()
    (-total / 3).backward()
    for name, parameter in model.named_parameters():
        if found[name] is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(found[name], parameter.grad)


def every_path(model, x, y, likelihood, modules):
    """log p(y | x, a) and log p(a | x) of all compositions of one data point, in the graph."""
    for path in product(*(range(m) for m in modules)):
        with routed(model, Given(torch.tensor([path]))) as route:
            yield likelihood(model(x), y), route.log_prob


@pytest.mark.parametrize("average", [None, -3.0])
def test_reinforce_is_right_on_average(average):
    """Its gradient, averaged over all compositions by their probability, is that of the bound (Eq. 12)."""
    model, x, y, likelihood = problem("classification")
    model.eval()
    reinforce = Reinforce(model, likelihood)
    reinforce.average = torch.tensor(-3.0 if average is None else average).double()
    modules = (3, 3, 4)
    bound = sum((p.exp() * score).sum() for score, p in every_path(model, x[:1], y[:1], likelihood, modules))
    exact = torch.autograd.grad(-bound, [*model.parameters()])
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for score, log_prob in every_path(model, x[:1], y[:1], likelihood, modules):
        weight = log_prob.detach().exp()
        loss = reinforce.surrogate(score, log_prob)
        for total, part in zip(
            expected, torch.autograd.grad(loss, [*model.parameters()], allow_unused=True), strict=True
        ):
            if part is not None:
                total += weight * part
    for a, b in zip(expected, exact, strict=True):
        torch.testing.assert_close(a, b)
        assert b.abs().max() > 1e-6


def test_reinforce_samples_give_that_gradient():
    model, x, y, likelihood = problem("regression")
    reinforce = Reinforce(model, likelihood)
    bound = sum((p.exp() * score).sum() for score, p in every_path(model, x[:1], y[:1], likelihood, (3,)))
    exact = torch.autograd.grad(-bound, [*model.parameters()])
    many = x[:1].expand(20_000, -1), y[:1].expand(20_000, -1)
    for _ in range(2):  # the first sets the average
        model.zero_grad()
        reinforce.loss(*many).backward()
    for parameter, wanted in zip(model.parameters(), exact, strict=True):
        assert (parameter.grad - wanted).norm() < 0.05 * wanted.norm() + 0.05


def toy(points: int = 300):
    """Two clusters, each with a linear map of its own; the most likely module must find both."""
    torch.manual_seed(0)
    first = torch.rand(points, 1) < 0.5
    x = torch.where(first, 3.0, -3.0) + 0.5 * torch.randn(points, 2)
    y = torch.where(first, x.flip(1), x * torch.tensor([0.5, -1.5]))
    return nn.Sequential(modular.Linear(2, 2, bias=False, modules=2)), x, y


@pytest.mark.parametrize(
    "make",
    [
        lambda model, ll, size: ViterbiEM(model, ll, size),
        lambda model, ll, size: Reinforce(model, ll),
        lambda model, ll, size: NoisyTopK(model, ll, mixed=2),
    ],
    ids=["em", "reinforce", "noisy top-k"],
)
@pytest.mark.slow
def test_all_three_train_the_same_network(make):
    model, x, y = toy()
    trainer = make(model, gaussian(0.05), len(x))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    with torch.no_grad():
        before = (model(x) - y).square().mean()
    for step in range(600):
        index = torch.randint(len(x), (64,))
        if isinstance(trainer, ViterbiEM) and step % 10 == 0:
            trainer.expect(x[index], y[index], index)
        optimiser.zero_grad()
        trainer.loss(x[index], y[index], index).backward()
        optimiser.step()
    model.eval()
    with torch.no_grad(), nc.trace(model) as seen:
        loss = (model(x) - y).square().mean()
    h_a, h_b = modular.training.entropies(seen)
    assert loss < 0.01 * before
    assert h_a < 0.2
    assert h_b > 0.65


@pytest.mark.parametrize("make", [lambda m, ll: ViterbiEM(m, ll, 30), Reinforce, NoisyTopK], ids=["em", "rf", "top-k"])
def test_a_resumed_run_is_the_run(make):
    model, x, y, likelihood = problem("sequences")
    trainer = make(model, likelihood)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)

    def steps(trainer, model, optimiser):
        losses = []
        for _ in range(3):
            index = torch.randint(30, (8,))
            if isinstance(trainer, ViterbiEM):
                trainer.expect(x[index], y[index], index)
            optimiser.zero_grad()
            loss = trainer.loss(x[index], y[index], index)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return losses

    steps(trainer, model, optimiser)
    saved = {name: value.clone() for name, value in trainer.state_dict().items()}
    twin = copy.deepcopy(model)
    twin_optimiser = torch.optim.Adam(twin.parameters(), lr=0.01)
    twin_optimiser.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    rng = torch.get_rng_state()
    wanted = steps(trainer, model, optimiser)
    torch.set_rng_state(rng)
    again = make(twin, likelihood)
    again.load_state_dict(saved)
    assert steps(again, twin, twin_optimiser) == wanted


def test_bad_input_changes_nothing():
    model, x, y, likelihood = problem("classification")
    em = ViterbiEM(model, likelihood, size=30)
    em.expect(x, y, torch.arange(30))
    stored = em.choices.clone()
    with pytest.raises(IndexError, match="index runs from 1 to 30; there are 30 data points"):
        em.expect(x[:2], y[:2], torch.tensor([1, 30]))
    with pytest.raises(IndexError, match="from -1"):
        em.loss(x[:2], y[:2], torch.tensor([-1, 3]))
    with pytest.raises(TypeError, match="whole numbers"):
        em.expect(x[:2], y[:2], torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="give the indices"):
        em.loss(x, y)
    with pytest.raises(ValueError, match="a path of 2 data points for 3"):
        em.expect(x[:3], y[:3], torch.tensor([1, 2]))
    state = em.state_dict()
    for size, change, message in (
        (20, {}, "stored for 30 data points; this data set has 20"),
        (30, {"choices": state["choices"] + 9}, "names a module that does not exist"),
        (30, {"other": state["choices"]}, "of another training"),
        (30, {"modules": state["modules"][:2]}, "stored choices of shape"),
    ):
        fresh = ViterbiEM(model, likelihood, size=size)
        fresh.expect(x[:5], y[:5], torch.arange(5))
        kept = fresh.choices.clone()
        with pytest.raises(ValueError, match=message):
            fresh.load_state_dict(state | change)
        assert torch.equal(fresh.choices, kept)
    assert torch.equal(em.choices, stored)
    with pytest.raises(ValueError, match="another training"):
        Reinforce(model, likelihood).load_state_dict(state)
    with pytest.raises(ValueError, match="no modular layer"):
        ViterbiEM(nn.Linear(2, 2), likelihood, 3)
    with pytest.raises(ValueError, match="size and samples"):
        ViterbiEM(model, likelihood, 0)
    with pytest.raises(ValueError, match="decay"):
        Reinforce(model, likelihood, decay=1)
    with pytest.raises(ValueError, match="mixed must be"):
        NoisyTopK(model, likelihood, mixed=0)
    with pytest.raises(ValueError, match="variance must be positive"):
        gaussian(0)
    with pytest.raises(ValueError, match="expected labels of shape"):
        classification(torch.zeros(3, 2), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="expected targets of shape"):
        gaussian()(torch.zeros(3, 2), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="one number a data point"):
        Reinforce(model, lambda output, target: output).loss(x, y)


def test_a_first_batch_that_fails_stores_nothing():
    em = ViterbiEM(nn.Sequential(modular.Linear(4, 2, modules=3)), gaussian(), size=5)
    for x, y, index in (
        (torch.randn(5, 9, 4), torch.randn(5, 6, 2), torch.arange(5)),
        (torch.randn(5, 6, 4), torch.randn(5, 6, 2), torch.arange(4)),
    ):
        for step in (em.expect, em.loss):
            with pytest.raises(ValueError, match=r"expected targets|a path of 4"):
                step(x, y, index)
            assert em.choices is None
    em.expect(torch.randn(5, 6, 4), torch.randn(5, 6, 2), torch.arange(5))
    with pytest.raises(ValueError, match="another training"):
        em.load_state_dict({})


def test_empty_batches_and_numbers_that_are_none():
    model, x, y, likelihood = problem("classification")
    reinforce = Reinforce(model, likelihood)
    reinforce.loss(x, y)
    average = reinforce.average.clone()
    reinforce.loss(x[:0], y[:0])
    assert torch.equal(reinforce.average, average)
    assert gaussian()(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0,)
    model = nn.Sequential(modular.Linear(4, 2, modules=2)).double()
    with torch.no_grad():
        model[0].pool[1].weight.fill_(float("nan"))
    em = ViterbiEM(model, gaussian(), size=30, samples=20)
    assert not em.expect(x, torch.randn(30, 2).double(), torch.arange(30)).isnan().any()
    assert not em.choices.any()


def test_likelihoods_of_other_data_points_are_refused():
    model = nn.Sequential(modular.Linear(4, 2, modules=3))
    steps = Reinforce(model, lambda output, target: -(output - target).square().sum((0, 2)))
    with pytest.raises(ValueError, match="5 likelihoods for 1 data points"):
        steps.loss(torch.randn(1, 5, 4), torch.randn(1, 5, 2))


def test_a_changed_length_says_so():
    model, x, y, likelihood = problem("sequences")
    em = ViterbiEM(model, likelihood, size=30)
    index = torch.arange(5)
    em.expect(x[:5], y[:5], index)
    with pytest.raises(ValueError, match="other choices than the 12"):
        em.expect(x[:5, :4], y[:5, :4], index)
    with pytest.raises(ValueError, match="other choices than the 12"):
        em.expect(torch.cat((x[:5], x[:5]), 1), torch.cat((y[:5], y[:5]), 1), index)
    model = nn.Sequential(modular.Linear(4, 2, modules=3))
    em = ViterbiEM(model, gaussian(), size=5)
    em.expect(torch.randn(5, 6, 4), torch.randn(5, 6, 2), index)
    with pytest.raises(ValueError, match="fewer choices than are stored"):
        em.loss(torch.randn(5, 4, 4), torch.randn(5, 4, 2), index)


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = modular.Linear(4, 4, modules=2), modular.Linear(4, 4, modules=2)

    def forward(self, x):
        return self.second(self.first(x).transpose(0, 1))


def test_data_points_must_come_first():
    with pytest.raises(ValueError, match="along the first dimension"):
        Reinforce(TimeFirst(), gaussian()).loss(torch.randn(5, 3, 4), torch.randn(3, 5, 4))
