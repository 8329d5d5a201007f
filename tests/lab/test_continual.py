"""Continual learning: scenarios, methods against their slow twins, metrics."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import neurocoder as nc
from neurocoder_lab import continual
from neurocoder_lab.continual import EWC, L2, SI, MultiHead, OnlineEWC, make, split, summary
from neurocoder_lab.continual.methods import METHODS
from neurocoder_lab.continual.optimisers import adam
from neurocoder_lab.continual.training import Learner
from neurocoder_lab.errors import LabError
from tests.lab.test_fisher import plain, slow_fisher

DATA = (torch.randn(40, 6), torch.arange(40) % 4)


def train(model, method, tasks, steps: int = 6):
    """A few steps on each of some tasks; returns what the method was told of each."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in tasks:
        for _ in range(steps):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            method.step(optimiser)
        method.finish(model, x, y)


def tasks(count: int = 3):
    torch.manual_seed(3)
    return [(torch.randn(9, 6, dtype=torch.float64), torch.randint(3, (9,))) for _ in range(count)]


class SlowEWC:
    """A Fisher and an anchor for every task, penalties through autograd."""

    def __init__(self, model, strength, online=False):
        self.model, self.strength, self.online, self.terms = model, strength, online, []

    def penalty(self):
        terms = [
            (importance[name] * (p - anchor[name]) ** 2).sum()
            for importance, anchor in self.terms
            for name, p in self.model.named_parameters()
        ]
        return self.strength * sum(terms)

    def step(self, optimiser):
        if self.terms:
            self.penalty().backward()
        optimiser.step()

    def finish(self, outputs, x, y):
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        importance = slow_fisher(self.model, x)
        if self.online and self.terms:
            old = self.terms[0][0]
            self.terms = [({name: old[name] + importance[name] for name in old}, weights)]
        else:
            self.terms.append((importance, weights))


@pytest.mark.parametrize("online", [False, True])
def test_ewc_with_one_anchor_is_ewc_with_an_anchor_a_task(online):
    torch.manual_seed(0)
    ours = plain().double()
    twin = plain().double()
    twin.load_state_dict(ours.state_dict())
    method, slow = (OnlineEWC if online else EWC)(ours, 30.0), SlowEWC(twin, 30.0, online)
    train(ours, method, tasks())
    train(twin, slow, tasks())
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    # values differ by a constant; differences between two points do not
    at = [(method.penalty(), slow.penalty())]
    with torch.no_grad():
        for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
            p += 0.1
            q += 0.1
    at.append((method.penalty(), slow.penalty()))
    torch.testing.assert_close(at[1][0] - at[0][0], at[1][1] - at[0][1], rtol=1e-9, atol=1e-12)


class SlowSI:
    """Two backwards a step, as the definition says."""

    def __init__(self, model, strength, damping=0.1):
        self.model, self.strength, self.damping = model, strength, damping
        self.start = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.path = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        self.importance, self.anchor = None, None

    def step(self, optimiser):
        gradients = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        if self.anchor:
            pull = sum((self.importance[n] * (p - self.anchor[n]) ** 2).sum() for n, p in self.model.named_parameters())
            (self.strength * pull).backward()
        optimiser.step()
        for n, p in self.model.named_parameters():
            self.path[n] -= gradients[n] * (p.detach() - before[n])

    def finish(self, outputs, x, y):
        now = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        gained = {n: self.path[n] / ((now[n] - self.start[n]) ** 2 + self.damping) for n in now}
        self.importance = gained if self.importance is None else {n: self.importance[n] + gained[n] for n in now}
        self.path = {n: torch.zeros_like(p) for n, p in now.items()}
        self.start, self.anchor = now, now


def test_si_is_its_definition():
    torch.manual_seed(0)
    ours, twin = plain().double(), plain().double()
    twin.load_state_dict(ours.state_dict())
    train(ours, SI(ours, 0.5), tasks())
    train(twin, SlowSI(twin, 0.5), tasks())
    for p, q in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_l2_stays_near_the_last_task_and_plain_training_does_not():
    distances = []
    for method in (lambda model: make("adam", model), lambda model: L2(model, 1.0)):
        torch.manual_seed(0)
        model = plain().double()
        used = method(model)
        train(model, used, tasks(1), steps=20)
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        train(model, used, tasks(2)[1:], steps=20)
        distances.append((nn.utils.parameters_to_vector(model.parameters()) - before).norm().item())
    assert distances[1] < 0.5 * distances[0]


@pytest.mark.parametrize("name", ["l2", "si", "ewc", "oewc"])
def test_state_goes_on_where_it_was(name):
    torch.manual_seed(0)
    model = plain().double()
    method = make(name, model, 3.0)
    train(model, method, tasks(2))
    again = plain().double()
    again.load_state_dict(model.state_dict())
    restored = make(name, again, 3.0)
    restored.load_state({key: tensor.clone() for key, tensor in method.state().items()})
    last = tasks(3)[2:]
    train(model, method, last)
    train(again, restored, last)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_states_are_copies_and_foreign_ones_refused():
    torch.manual_seed(0)
    model = plain().double()
    method = make("si", model, 3.0)
    train(model, method, tasks(1))
    state = method.state()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    train(model, method, tasks(2)[1:])
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())
    with pytest.raises(ValueError, match="not in the state of the EWC"):
        EWC(model, 1.0).load_state(state)
    with pytest.raises(ValueError, match="not in the state of the Method"):
        make("adam", model).load_state(state)
    for foreign in ("SI.path.0.weight", "SI.parameters.0.weight", "path.0.weight"):
        with pytest.raises(ValueError, match="is not in the state of the SI"):
            method.load_state({foreign: torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"SI.anchor.0.weight of the state is not finite"):
        method.load_state(state | {"SI.anchor.0.weight": torch.full((5, 6), torch.nan)})
    with pytest.raises(ValueError, match="every parameter's start"):
        method.load_state({})
    without = {name: tensor for name, tensor in state.items() if not name.startswith("SI.anchor")}
    with pytest.raises(ValueError, match="importance and anchor, or neither"):
        method.load_state(without)
    del without["SI.importance.0.weight"]
    with pytest.raises(ValueError, match="every parameter's importance"):
        method.load_state(without)
    method.load_state(state)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in method.state().items())


def test_a_run_says_what_to_do_with_another_method_s_checkpoint():
    model = nn.Linear(6, 2)
    stream = split(DATA, DATA, [[0, 1], [2, 3]], "domain")
    learner = Learner(model, torch.optim.Adam(model.parameters()), stream, make("l2", model, 1.0), epochs=1, batch=8)
    foreign = learner.state() | {"method.SI.path.weight": torch.zeros(2, 6)}
    with pytest.raises(LabError, match=r"remove the run's folder to start again: SI\.path\.weight is not"):
        learner.load_state(foreign)


@pytest.mark.parametrize("name", ["l2", "si", "ewc"])
def test_a_method_made_before_the_surgery_says_so(name):
    model = plain()
    method = make(name, model, 1.0)
    nc.recode(model, "0", slots=3)
    with pytest.raises(ValueError, match="re-code and freeze before it"):
        method.step(torch.optim.SGD(model.parameters(), lr=0.1))
    method = make(name, model, 1.0)
    with pytest.raises(ValueError, match="optimiser lacks parameters"):
        method.step(torch.optim.SGD(plain().parameters(), lr=0.1))
    model[2].requires_grad_(False)
    with pytest.raises(ValueError, match="re-code and freeze before it"):
        method.finish(model, torch.randn(3, 6), torch.zeros(3).long())


def test_a_network_of_another_width_or_task_is_refused():
    stream = split(DATA, DATA, [[0, 1], [2, 3]], "class")
    x = DATA[0]
    with pytest.raises(ValueError, match="must give 4 outputs"):
        stream.logits(nn.Linear(6, 3), x, 0)
    with pytest.raises(ValueError, match=r"tasks 0 \.\. 1"):
        stream.logits(nn.Linear(6, 4), x, 2)
    with pytest.raises(ValueError, match="of 2 tasks 3"):
        continual.accuracies(stream, nn.Linear(6, 4), 3)
    with pytest.raises(TypeError, match="as MultiHead"):
        split(DATA, DATA, [[0, 1]], "task").logits(nn.Linear(6, 2), x, 0)
    whole = continual.Stream("domain", ((x, DATA[1].int()),), (DATA,), (4,))
    assert whole.train[0][1].dtype == torch.long


def test_a_network_with_nan_has_no_accuracy():
    stream = split(DATA, DATA, [[0, 1], [2, 3]], "domain")
    network = nn.Linear(6, 2)
    assert continual.accuracies(stream, network, 0).shape == (2,)
    with torch.no_grad():
        network.weight.fill_(float("nan"))
    with pytest.raises(LabError, match="not finite"):
        continual.accuracies(stream, network, 0)


def test_a_head_of_another_task_stays_put():
    torch.manual_seed(0)
    model = MultiHead(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), [nn.Linear(5, 2), nn.Linear(5, 2)])
    method, optimiser = make("ewc", model, 100.0), torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 6), torch.randint(2, (8,))
    for task in (0, 1):
        held = model.heads[0].weight.detach().clone()
        for _ in range(3):
            optimiser.zero_grad()
            F.cross_entropy(model(x, task), y).backward()
            method.step(optimiser)
        method.finish(lambda x, task=task: model(x, task), x, y)
        assert torch.equal(held, model.heads[0].weight) == (task == 1)
    with pytest.raises(ValueError, match="heads for tasks 0"):
        model(x, 2)


def test_methods_refuse_what_makes_no_sense():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        EWC(plain(), -1.0)
    with pytest.raises(ValueError, match="at least 0, got nan"):
        SI(plain(), float("nan"))
    with pytest.raises(ValueError, match="needs a strength"):
        make("ewc", plain())
    with pytest.raises(ValueError, match="has no strength"):
        make("adam", plain(), 3.0)
    assert type(make("adam", plain(), 0)) is type(make("adam", plain())) is continual.Method
    with pytest.raises(ValueError, match="no parameter that is trained"):
        EWC(plain().requires_grad_(False), 1.0)
    with pytest.raises(ValueError, match="one of adam, adagrad"):
        make("dropout", plain())


def test_the_three_scenarios_of_the_same_data():
    groups = [[2, 3], [0, 1]]
    labels = {}
    for scenario in ("task", "domain", "class"):
        stream = split(DATA, DATA, groups, scenario)
        assert len(stream) == 2
        assert all(len(y) == 20 for _, y in (*stream.train, *stream.test))
        labels[scenario] = [sorted({*y.tolist()}) for _, y in stream.train]
    assert labels == {"task": [[0, 1], [0, 1]], "domain": [[0, 1], [0, 1]], "class": [[0, 1], [2, 3]]}
    assert split(DATA, DATA, groups, "task").outputs == (2, 2)
    assert split(DATA, DATA, groups, "domain").outputs == 2
    stream = split(DATA, DATA, groups, "class")
    assert stream.outputs == 4
    x = stream.train[0][0]
    assert torch.equal(x, DATA[0][(DATA[1] == 2) | (DATA[1] == 3)])
    network = nn.Linear(6, 4)
    assert stream.logits(network, x, 0).shape == (20, 2)
    assert stream.logits(network, x, 0, learned=2).shape == (20, 4)


def test_classes_may_be_tensors_and_any_numbers():
    order = torch.tensor([[3, 0], [1, 2]])
    given, wanted = (split(DATA, DATA, groups, "class") for groups in (order, order.tolist()))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(given.train, wanted.train, strict=True))
    y = torch.tensor([-3, 10**12])[DATA[1] % 2]
    arrays = DATA[0].numpy(), y.numpy()
    (_, labels), *_ = split(arrays, arrays, [[-3, 10**12]], "task").train
    assert torch.equal(labels, DATA[1] % 2)


def test_streams_refuse_what_makes_no_sense():
    with pytest.raises(ValueError, match="no class may stand twice"):
        split(DATA, DATA, [[0, 1], [1, 2]], "task")
    with pytest.raises(ValueError, match="no example of class 7"):
        split(DATA, DATA, [[0, 7]], "task")
    with pytest.raises(ValueError, match="scenario must be one of"):
        split(DATA, DATA, [[0, 1]], "tasks")
    with pytest.raises(ValueError, match=r"labels outside of 0 \.\. 1"):
        continual.Stream("domain", (DATA,), (DATA,), (2,))
    with pytest.raises(TypeError, match="lists of labels"):
        split(DATA, DATA, [0, 1], "task")
    with pytest.raises(TypeError, match="pair of inputs and labels, got a TensorDataset"):
        split(torch.utils.data.TensorDataset(*DATA), DATA, [[0, 1]], "task")
    with pytest.raises(TypeError, match="how many each task has"):
        continual.Stream("domain", (DATA,), (DATA,), ([0, 1],))
    with pytest.raises(ValueError, match="head of its own"):
        MultiHead(nn.Identity(), [nn.Linear(6, 2)] * 2)
    with pytest.raises(ValueError, match="whole labels"):
        split((DATA[0], DATA[1].float()), DATA, [[0, 1]], "task")
    with pytest.raises(ValueError, match="40 inputs and 39 labels"):
        split((DATA[0], DATA[1][1:]), DATA, [[0, 1]], "task")
    with pytest.raises(ValueError, match="0 inputs and 0 labels"):
        split(DATA, (DATA[0][:0], DATA[1][:0]), [[0, 1]], "task")
    bytes_ = (DATA[0], DATA[1].to(torch.uint8))
    assert torch.equal(split(bytes_, bytes_, [[2, 3]], "task").train[0][0], DATA[0][DATA[1] >= 2])
    with pytest.raises(ValueError, match="same tasks"):
        continual.Stream("domain", (DATA,), (), (4,))


def test_metrics_by_hand():
    matrix = torch.tensor([[50.0, 40, 30], [90, 50, 45], [70, 80, 40], [60, 70, 100]])
    numbers = summary(matrix)
    assert numbers["accuracy"] == pytest.approx(230 / 3)
    assert numbers["learned"] == pytest.approx(90)
    assert numbers["forgetting"] == pytest.approx((30 + 10) / 2)
    assert numbers["backward_transfer"] == pytest.approx((-30 - 10) / 2)
    assert numbers["forward_transfer"] == pytest.approx((50 - 40 + 40 - 30) / 2)
    assert summary(torch.tensor([[50.0], [90.0]])) == {"accuracy": 90.0, "learned": 90.0}
    assert summary([*matrix]) == numbers
    with pytest.raises(ValueError, match="tasks \\+ 1"):
        summary(torch.zeros(3, 3))


def sparse_model() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    nc.recode(model, "0", slots=30, heads=2, top_k=1, one_choice=True, addresses="fixed", sparse=True)
    return model.double()


@pytest.mark.parametrize("name", ["l2", "si", "ewc", "oewc"])
def test_penalties_know_rows_that_were_not_read(name):
    """What was not read stays where it is; what was is pulled as a dense gradient would be."""
    model = sparse_model()
    optimiser, method = adam(model, 0.01), METHODS[name](model, 2.0)
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(3, (12,))

    def learn(rows: slice) -> None:
        for _ in range(3):
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            method.step(optimiser)

    learn(slice(6))
    method.finish(model, x[:6], y[:6])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with nc.trace(model) as seen:
        model(x[6:])
    learn(slice(6, 12))
    left = model[0].memory.left
    read = torch.zeros(30, dtype=torch.bool)
    read[seen["0"].chosen.flatten()] = True
    moved = (left != before["0.memory.left_rows.weight"]).any(1)
    assert torch.equal(moved, read)
    optimiser.zero_grad()
    F.cross_entropy(model(x[6:]), y[6:]).backward()
    plain = left.grad.to_dense()
    method.pull()
    kind = "0.memory.left_rows.weight"
    pull = 4.0 * method.importance[kind] * (left - method.anchor[kind]).detach()
    assert torch.allclose(left.grad.to_dense(), plain + pull * read[:, None])
    assert pull.abs().sum() > 0


def test_two_optimisers_as_one_go_on_from_their_state():
    model = sparse_model()
    optimiser = adam(model, 0.01)
    x = torch.randn(12, 6, dtype=torch.float64)

    def step(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()

    step(model, optimiser)
    other = copy.deepcopy(model)
    resumed = adam(other, 0.01)
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for _ in range(2):
        step(model, optimiser)
        step(other, resumed)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert len(optimiser.state_dict()["state"]) == len([*model.parameters()])
