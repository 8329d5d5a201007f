"""The Neural Turing Machine: addressing by hand-computed tables, everything by a loop twin, and the surgery of its
interface."""

from math import exp, log

import pytest
import torch
from torch.nn import functional as F

import neurocoder as nc
from neurocoder.functional import EPSILON
from neurocoder_lab.turing import TINY, TuringMachine, access

step = TuringMachine.step
OFF, ON = -40.0, 40.0  # of a sigmoid, a softplus or a softmax: 0 and 1 to the last bit of float64
BEFORE = (0.1, 0.2, 0.3, 0.4)
ROOT = 2**0.5 / 2
MEMORY = ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (1.0, 1.0))  # rows
HALF_OF_CONTENT = tuple(2.0**cosine / (3.5 + 2.0**ROOT) / 2 + 0.125 for cosine in (1, 0, -1, ROOT))


def softplus_gives(value):
    return log(exp(value) - 1)


def raw(key=(1.0, 0.0), strength=OFF, gate=OFF, shift=(OFF, ON, OFF), sharp=OFF, erase=(OFF, OFF), add=(0.0, 0.0)):
    """An interface vector with which both heads do the same."""
    both = [*key, *key, strength, strength, gate, gate, *shift, *shift, sharp, sharp]
    return torch.tensor([[*both, *erase, *add]], dtype=torch.float64)


def accessed(interface, before=BEFORE, memory=MEMORY):
    memory = torch.tensor([memory], dtype=torch.float64).transpose(1, 2)
    read, written, weight = access(interface, memory, torch.tensor([[before, before]], dtype=torch.float64))
    return read[0], written[0].t(), weight[0]


@pytest.mark.parametrize(
    ("signals", "before", "wanted"),
    [
        ({}, BEFORE, BEFORE),  # the gate is shut: as it was
        ({"shift": (OFF, OFF, ON)}, BEFORE, (0.4, 0.1, 0.2, 0.3)),  # one row on, round the end
        ({"shift": (ON, OFF, OFF)}, BEFORE, (0.2, 0.3, 0.4, 0.1)),  # one row back
        ({"shift": (0.0, OFF, 0.0)}, (1.0, 0.0, 0.0, 0.0), (0.0, 0.5, 0.0, 0.5)),  # half of it each way
        ({"sharp": softplus_gives(1)}, BEFORE, (1 / 30, 4 / 30, 9 / 30, 16 / 30)),  # squares
        ({"gate": ON, "strength": ON}, BEFORE, (1.0, 0.0, 0.0, 0.0)),  # the row like the key, wherever it was
        ({"gate": ON}, BEFORE, (0.25, 0.25, 0.25, 0.25)),  # without strength all rows are alike
        ({"gate": 0.0, "strength": softplus_gives(log(2))}, (0.25,) * 4, HALF_OF_CONTENT),
    ],
)
def test_addressing_by_hand(signals, before, wanted):
    weight = accessed(raw(**signals), before)[2]
    wanted = torch.tensor([wanted, wanted], dtype=torch.float64)
    torch.testing.assert_close(
        weight, wanted, atol=2e-5, rtol=0
    )  # squared norms have 1e-6 added, times a strength of 40
    assert not torch.allclose(weight, wanted.roll(1, -1), atol=2e-5) or wanted.unique().numel() == 1


def test_reading_and_writing_by_hand():
    erase, add = (ON, 0.0), (0.5, -1.0)  # the first column wholly, half of the second
    signals = raw(erase=erase, add=add)
    read, written, _ = accessed(signals, (0.0, 0.0, 0.0, 1.0))
    wanted = torch.tensor(MEMORY, dtype=torch.float64)
    torch.testing.assert_close(read, wanted[3])  # before it is written
    wanted[3] = torch.tensor([0.0, 0.5]) + torch.tensor(add).tanh()
    torch.testing.assert_close(written, wanted)
    read, written, _ = accessed(signals, (0.5, 0.5, 0.0, 0.0))
    torch.testing.assert_close(read, torch.tensor([0.5, 0.5], dtype=torch.float64))
    torch.testing.assert_close(written[2:], torch.tensor(MEMORY[2:], dtype=torch.float64))
    half = 0.5 * torch.tensor(add, dtype=torch.float64).tanh()
    torch.testing.assert_close(written[:2], torch.tensor([[0.5, 0.0], [0.0, 0.75]], dtype=torch.float64) + half)


def reference(machine, x_BTX):
    """What `machine(x_BTX)` must give, row by row of batch and memory, from its parameters."""
    width, rows = machine.memory.shape
    outputs = []
    for x_TX in x_BTX:
        hidden, cell, read = machine.hidden, machine.cell, machine.read
        memory = [machine.memory[:, n] for n in range(rows)]
        weights = [list(head.exp() / head.exp().sum()) for head in machine.focus]
        steps = []
        for x_X in x_TX:
            seen = torch.cat((x_X, read))[None]
            hidden, cell = (part[0] for part in machine.controller(seen, (hidden[None], cell[None])))
            said = machine.interface(hidden[None])[0]
            keys, said = said[: 2 * width].view(2, width), said[2 * width :]
            weights = [
                address(
                    keys[head], said[head], said[2 + head], said[4 + 3 * head : 7 + 3 * head], said[10 + head], memory,
                    weights[head],
                )
                for head in (0, 1)
            ]  # fmt: skip
            read = sum(w * row for w, row in zip(weights[0], memory, strict=True))
            erase, add = said[12 : 12 + width].sigmoid(), said[12 + width :].tanh()
            memory = [row * (1 - w * erase) + w * add for w, row in zip(weights[1], memory, strict=True)]
            steps.append(machine.output(torch.cat((hidden, read))))
        outputs.append(torch.stack(steps))
    return torch.stack(outputs)


def address(key, strength, gate, shift, sharp, memory, before):
    key, rows = key.tanh(), len(memory)
    sizes = [(vector.square().sum() + EPSILON).sqrt() for vector in (key, *memory)]
    likeness = [
        (F.softplus(strength) * (key @ row) / (sizes[0] * size)).exp()
        for row, size in zip(memory, sizes[1:], strict=True)
    ]
    content = [value / sum(likeness) for value in likeness]
    g = gate.sigmoid()
    gated = [g * now + (1 - g) * then for now, then in zip(content, before, strict=True)]
    moves = shift.exp() / shift.exp().sum()
    shifted = [sum(moves[1 + by] * gated[(n - by) % rows] for by in (-1, 0, 1)) + TINY for n in range(rows)]
    sharpened = [value ** (1 + F.softplus(sharp)) for value in shifted]
    return [value / sum(sharpened) for value in sharpened]


@pytest.mark.parametrize("options", [None, {"slots": 6, "heads": 2, "key_dim": 3, "residual": True}])
def test_it_equals_its_twin_in_outputs_and_all_gradients(options):
    torch.manual_seed(0)
    machine = TuringMachine(3, 2, hidden=5, rows=4, width=3)
    if options:
        nc.recode(machine, "interface", **options)
    machine.double()
    with torch.no_grad():
        for parameter in machine.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    wanted_of = [x, *machine.parameters()]
    slope = torch.randn(2, 4, 2, dtype=torch.float64)
    ours, theirs = machine(x), reference(machine, x)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)
    of_ours, of_theirs = (torch.autograd.grad(y, wanted_of, slope) for y in (ours, theirs))
    for mine, other in zip(of_ours, of_theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-11, rtol=1e-8)
    assert all(gradient.any() for gradient in of_ours)
    with torch.no_grad():
        machine.memory[0, 1] += 0.1
    assert not torch.allclose(machine(x), theirs)


def test_state_is_all_that_a_step_needs():
    torch.manual_seed(0)
    machine = TuringMachine(3, 2, hidden=5, rows=4, width=3)
    x = torch.randn(2, 3, 3)
    state = machine.start(2)
    for step in x.unbind(1):
        state = machine.step(step, state)
    last = machine.output(torch.cat((state.hidden_BH, state.read_BW), -1))
    torch.testing.assert_close(last, machine(x)[:, -1])
    torch.testing.assert_close(state.weight_B2N.sum(-1), torch.ones(2, 2))
    torch.testing.assert_close(machine(x[1:]), machine(x)[1:])  # nothing stays on the module, no row sees another


def test_sequences_that_are_over_are_left_out_and_the_others_are_as_before():
    torch.manual_seed(0)
    machine, x = TuringMachine(3, 2, hidden=5, rows=4, width=3).double(), torch.randn(20, 6, 3, dtype=torch.float64)
    length = torch.tensor([6] * 3 + [4] * 8 + [3] * 5 + [1] * 4)
    there, rows = torch.arange(6) < length[:, None], []
    found = []
    for lengths in (length, None):
        machine.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TuringMachine, "step", lambda self, *given: rows.append(len(given[0])) or step(self, *given))
            y = machine(x, lengths)[there]
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in machine.parameters())])
    assert rows == [20, 16, 16, 16, 8, 8] + [20] * 6  # of 20, 16, 16, 11, 3, 3, eight at a time
    for ours, whole in zip(*found, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="longest first"):
        machine(x, length.flip(0))


def test_an_idle_head_changes_nothing():
    memory, before = torch.randn(2, 3, 5), torch.rand(2, 2, 5).softmax(-1)
    idle = torch.zeros(2, 4 * 3 + 12)
    idle[:, 6:8], idle[:, 8:10], idle[:, 16:18] = OFF, OFF, OFF  # strength, gate, sharpening
    idle[:, 10:16] = torch.tensor([OFF, ON, OFF, OFF, ON, OFF])
    idle[:, 18:21] = OFF  # erase
    read, written, weight = access(idle, memory, before)
    assert torch.equal(written, memory)
    torch.testing.assert_close(weight, before)
    torch.testing.assert_close(read, torch.einsum("bwn,bn->bw", memory, before[:, 0]))


def test_the_interface_is_recoded_and_traced_like_any_layer():
    machine = TuringMachine(10, 8)
    assert nc.recode(machine, "interface", slots=30, heads=5) == ["interface"]
    with nc.trace(machine) as seen:
        machine(torch.zeros(2, 3, 10))
    assert len(seen.calls("interface")) == 3
    assert seen.stacked("interface").left.shape == (3, 2, 5, 30)


def test_half_precision_leaves_the_memory_whole():
    machine = TuringMachine(3, 2, hidden=5, rows=4, width=3)
    with torch.autocast("cpu", torch.bfloat16):
        state = machine.step(torch.randn(2, 3), machine.start(2))
        machine(torch.randn(2, 3, 3)).sum().backward()
    assert state.memory_BWN.dtype == state.weight_B2N.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in machine.parameters())
