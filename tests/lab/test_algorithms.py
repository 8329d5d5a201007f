"""The experiment algorithms: every answer by a plain interpreter, what counts and what does not, runs that resume."""

import json

import pytest
import torch

import neurocoder as nc
from neurocoder_lab import bench, speed
from neurocoder_lab.chains import ALGORITHMS, BITS, CALL, NUMBER, SYMBOL, Ranges, answers, chains, lengths
from neurocoder_lab.cli import main
from neurocoder_lab.experiments import algorithms
from neurocoder_lab.experiments.algorithms import EXPERIMENT, MODELS, TESTED, Algorithms, Learner
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute, folder_of
from neurocoder_lab.sweep import grid
from neurocoder_lab.turing import TuringMachine

TINY = {"budget": "smoke", "iterations": 4}


def parsed(x_TX):
    """The tasks of a sequence, as (algorithm, steps), and how many steps come before the answers."""
    tasks = []
    for place, step in enumerate(x_TX.tolist()):
        said = step[:BITS].index(1) if step[SYMBOL] else None
        if said == CALL:
            return tasks, place + 1
        if said is None:
            tasks[-1][1].append((step[:BITS], step[NUMBER]))
        else:
            tasks.append((ALGORITHMS[said], []))
    raise AssertionError("nothing calls for the answers")


def solve(algorithm, steps):
    """What is to be answered, from what was given."""
    bits = [bits for bits, _ in steps]
    if algorithm == "copy":
        return bits
    if algorithm == "repeat copy":
        return bits[1:] * round((steps[0][1] + 3) / 2)
    if algorithm == "priority sort":
        return [bits for bits, _ in sorted(steps, key=lambda step: -step[1])][:2]
    assert [number for _, number in steps] == [0.0] * (len(steps) - 2) + [1.0] * 2  # the query is marked
    items = [bits[place : place + 2] for place in range(0, len(bits), 2)]
    *items, query = items
    return items[items.index(query) + 1]


@pytest.mark.parametrize("ranges", [Ranges(), *TESTED.values(), Ranges((1, 10), (1, 1), (2, 2), (3, 5))])
def test_every_answer_is_that_of_a_plain_interpreter(ranges):
    x, y, phase = chains(40, 3, ranges, generator=torch.Generator().manual_seed(0))
    for x_TX, y_TX, phase_T in zip(x, y, phase, strict=True):
        tasks, start = parsed(x_TX)
        assert len(tasks) == 3
        solved = [(algorithm, solve(algorithm, steps)) for algorithm, steps in tasks]
        wanted = [bits for _, some in solved for bits in some]
        end = start + len(wanted)
        assert y_TX[start:end].tolist() == wanted
        said = [ALGORITHMS.index(algorithm) for algorithm, steps in tasks for _ in range(len(steps) + 1)]
        said += [CALL, *(CALL + 1 + ALGORITHMS.index(name) for name, some in solved for _ in some)]
        assert phase_T.tolist() == said + [-1] * (len(phase_T) - end)
        assert not x_TX[start:].any()
        assert not y_TX[:start].any()
        assert not y_TX[end:].any()
        assert answers(phase_T).nonzero().flatten().tolist() == [*range(start, end)]
    assert lengths(phase)[0] == phase.shape[1]  # no longer than it must be
    assert (lengths(phase).diff() <= 0).all()


def test_every_size_in_a_range_is_drawn_and_none_beyond():
    x, _, _ = chains(600, 2, generator=torch.Generator().manual_seed(0))
    tasks = [task for row in x for task in parsed(row)[0]]
    sizes = {name: {len(steps) for algorithm, steps in tasks if algorithm == name} for name in ALGORITHMS}
    wanted = {"copy": {1, 2, 3}, "repeat copy": {2, 3, 4}, "associative recall": {6, 8}, "priority sort": {3}}
    assert sizes == wanted
    assert {steps[0][1] for name, steps in tasks if name == "repeat copy"} == {-1.0, 1.0}
    shares = [sum(algorithm == name for algorithm, _ in tasks) / len(tasks) for name in ALGORITHMS]
    assert all(0.2 < share < 0.3 for share in shares)
    asked = [[bits for bits, _ in steps] for name, steps in tasks if name == "associative recall" and len(steps) == 8]
    assert {bits[0:6:2].index(bits[6]) for bits in asked} == {0, 1}


def test_chance_is_torchs_own():
    torch.manual_seed(3)
    first = chains(4, 2)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(first, chains(4, 2), strict=True))
    assert not torch.equal(first.x_BTX, chains(4, 2).x_BTX)


def test_nothing_but_answers_counts():
    _, y, phase = chains(8, 2, generator=torch.Generator().manual_seed(0))
    right = torch.where(y > 0, 1.0, -1.0)
    assert not algorithms.bit_errors(right, y, phase).any()
    elsewhere = torch.where(answers(phase)[..., None], right, -right)
    assert not algorithms.bit_errors(elsewhere, y, phase).any()
    one = right.clone()
    step = answers(phase)[0].nonzero()[0, 0]
    one[0, step, 3] *= -1
    wrong = algorithms.bit_errors(one, y, phase)
    assert wrong[0].item() == pytest.approx(100 / (BITS * answers(phase)[0].sum().item()))
    assert not wrong[1:].any()
    undefined = torch.where(answers(phase)[..., None], right, torch.nan)
    assert not algorithms.by_sequence(undefined.isnan().float(), phase).any()


@pytest.mark.parametrize("model", MODELS)
def test_controllers_are_as_wide_as_the_papers_sizes_allow(model):
    with torch.device("meta"):
        size = sum(p.numel() for p in algorithms.build(model).parameters())
    assert size == pytest.approx(algorithms.PAPER.get(model, algorithms.PAPER["neurocoder"]), rel=0.01)


def test_it_learns():
    torch.manual_seed(0)
    machine, errors = TuringMachine(10, BITS, hidden=32, rows=8, width=8), []
    optimiser = torch.optim.Adam(machine.parameters(), lr=0.01)
    for _ in range(200):
        x, y, phase = chains(32, 1, Ranges(length=(1, 2)), torch.zeros(32, 1, dtype=torch.long))
        logits = machine(x)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits[answers(phase)], y[answers(phase)])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        errors.append(algorithms.bit_errors(logits, y, phase).mean().item())
    assert sum(errors[-10:]) / 10 < 15  # chance: 50


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A run of each kind, as a sweep would distil it."""
    runs, folder = Runs(), tmp_path_factory.mktemp("runs")
    for place in ({"model": "neurocoder"}, {"model": "nsm"}, {"model": "ntm"}, {"model": "ntm", "setting": "copy"}):
        config = Algorithms(**place, **TINY)
        result, full = execute(EXPERIMENT, config, folder, quiet=True), EXPERIMENT.resolve(config)
        lines = (folder_of(EXPERIMENT, config, folder) / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        runs.append({"config": vars(full), "curve": {name: [row[name] for row in rows] for name in rows[0]}} | result)
    return runs, folder


def test_a_run_ends_with_what_it_measures(smoke):
    runs, _ = smoke
    ours, _, ntm, copy = (run["final"] for run in runs)
    assert {*EXPERIMENT.metrics} <= ours.keys()
    assert {*EXPERIMENT.metrics} - ntm.keys() == {"phase_told"}
    assert "bit_error_longer" not in copy
    assert copy["bit_error"] == pytest.approx(50, abs=10)
    assert ours["best_validation"] == min(runs[0]["curve"]["validation"])
    phases = [example["phases"] for example in ours["programs"]]
    assert {phase for some in phases for phase in some} == {*range(9)}  # all of both kinds
    assert sum(ours["programs"][0]["use"][0]) == pytest.approx(1, abs=0.02)
    assert 0 <= ours["phase_told"] <= 1


def test_tables_and_figures(smoke):
    runs, _ = smoke
    (copy, _, _), (title, header, rows) = sorted(algorithms.tabulate(runs), key=lambda table: len(table[2]))
    assert "Copy alone" in copy
    assert title.startswith("2 tasks a sequence, 4 iterations, shortened")
    assert [row[0] for row in rows] == ["NTM", "NSM", "Neurocoder"]
    assert all(len(row) == len(header) for row in rows)
    titles = [title for title, svg in algorithms.draw(runs) if svg.startswith("<svg")]
    assert [title[:10] for title in titles] == ["Fig 7 left", "Fig 7 righ", "NSM, 2 tas", "Neurocoder", "Copy alone"]


def test_what_was_best_is_kept_and_measured(tmp_path, monkeypatch):
    seen = []

    def error(self, data):
        seen.append(self.model.output.bias.detach().clone())
        return [40.0, 30.0, 35.0, 45.0][len(seen) - 1] if len(seen) <= 4 else 0.0

    monkeypatch.setattr(Learner, "error", error)
    result = execute(EXPERIMENT, Algorithms(model="ntm", **TINY), tmp_path, quiet=True)
    assert result["final"]["best_validation"] == 30.0
    assert torch.equal(seen[4], seen[1])
    assert not torch.equal(seen[4], seen[3])


def test_resumed_in_the_middle_of_training_it_is_the_same_run(smoke, tmp_path, monkeypatch):
    _, folder = smoke
    config, step = Algorithms(model="neurocoder", **TINY), Learner.step

    def failing(self, index):
        if index == 2:
            raise KeyboardInterrupt
        return step(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "step", failing)
        with pytest.raises(KeyboardInterrupt):
            execute(EXPERIMENT, config, tmp_path, checkpoint_seconds=0, quiet=True)
    execute(EXPERIMENT, config, tmp_path, quiet=True)
    again, whole = (folder_of(EXPERIMENT, config, place) for place in (tmp_path, folder))
    assert (again / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    finals = [json.loads((place / "result.json").read_text())["final"] for place in (again, whole)]
    assert finals[0] == finals[1]


def test_what_is_asked_for_is_filled_in():
    def full(**settings):
        config = EXPERIMENT.resolve(Algorithms(**settings))
        return config.tasks, config.iterations

    assert full() == (2, 8000)
    assert full(budget="paper") == (8, 100_000)
    assert full(setting="copy") == (1, 4000)
    assert len(grid(EXPERIMENT, EXPERIMENT.axes | EXPERIMENT.main, 3)) == 3 * 5
    assert len(grid(EXPERIMENT, EXPERIMENT.axes, 1)) == 5 * (3 + 1)  # copy has one task, chain has not
    layer = algorithms.build("neurocoder").interface
    assert isinstance(layer, nc.Linear)
    assert (layer.slots, layer.steps, layer.heads, layer.key_dim, layer.least_used) == (30, 1, 5, 5, 2)
    assert layer.memory.gate_weight is None  # with one step nothing was used before: no gates, whatever least_used says


def test_time_steps_are_timed(monkeypatch):
    rates, ratios = bench.turing(repeats=1, steps=2, rows=2).values()
    assert {*algorithms.NAMES.values()} == rates.keys() - {"dense"} == ratios.keys() - {"dense ms"}
    assert ratios["NTM"] == pytest.approx(rates["dense"] / rates["NTM"], rel=0.02)  # both are rounded
    monkeypatch.setattr(algorithms, "BATCH", 2)
    found = speed.compare("ntm", repeats=1, seed=0)
    assert [*found] == ["original", "nsm", "hypernet", "film", "neurocoder"]
    assert found["original"]["step_ratio"] == 1.0
    ours = found["neurocoder"]
    assert ours["time_steps"] / found["original"]["time_steps"] == pytest.approx(1 / ours["step_ratio"])


def test_a_sweep_takes_the_tasks_of_its_setting_and_budget(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("neurocoder_lab.sweep.sweep", lambda experiment, configs, *_, **__: asked.extend(configs) or [])
    for words, tasks in (
        ([], 2),
        (["--budget", "paper"], 8),
        (["--setting", "copy"], 1),
        (["--tasks", "None", "2"], 2),
    ):
        asked = []
        folders = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
        assert main(["sweep", "algorithms", "--seeds", "1", *words, *folders]) == 0
        assert [config.tasks for config in asked] == [tasks] * 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--setting", "copy", "--tasks", "2"], "copy has one task a sequence, chain at least two"),
        (["--tasks", "1"], "got --tasks 1 of chain"),
        (["--tasks", "0"], "tasks must be at least 1"),
        (["--rate", "0"], "rate must be a positive number"),
        (["--iterations", "0"], "iterations must be at least 1"),
    ],
)
def test_wrong_use_is_told(tmp_path, capsys, words, said):
    assert main(["run", "algorithms", *words, "--runs", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
