"""The experiment penn-treebank: how text is cut and carried on, what modules tell of words, small runs of its rows."""

import time
from math import log

import pytest
import torch
from accelerate import Accelerator

import neurocoder as nc
from neurocoder.modular.route import NoisyMixture, routed
from neurocoder.modular.training import ViterbiEM, entropies
from neurocoder_lab import contexts, data, speed
from neurocoder_lab.cli import main
from neurocoder_lab.data import segments, streams
from neurocoder_lab.errors import LabError
from neurocoder_lab.experiments import penn_treebank
from neurocoder_lab.experiments.penn_treebank import EXPERIMENT, ROWS, PennTreebank, WordModel
from neurocoder_lab.modules import reached_by_all
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute
from neurocoder_lab.sweep import grid
from tests.lab import sentences
from tests.lab.small import distilled, same_when_stopped


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for seed, (split, count) in enumerate((("train", 2400), ("validation", 800), ("test", 800))):
        sentences.write(folder, split, count, seed)
    return {"NEUROCODER_DATA": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}


@pytest.fixture(autouse=True)
def _here(places, monkeypatch):
    for name, value in places.items():
        monkeypatch.setenv(name, value)


def test_words_are_numbered_by_how_often_they_stand():
    text = data.words("ptb")
    assert text.vocabulary[:3] == ("the", "<eos>", "N")
    assert {*text.vocabulary} == {"the", "<eos>", "N", "<unk>", "of", *sentences.THINGS, *sentences.VERBS}
    counts = torch.bincount(text.train)
    assert (counts.diff() <= 0).all()
    assert counts[1] == 2400
    assert text.vocabulary[text.train[-1]] == "<eos>"
    with pytest.raises(LabError, match="no text is called 'pbt'"):
        data.words("pbt")


def test_a_word_that_was_never_trained_on_is_told(tmp_path, monkeypatch):
    for split in ("train", "validation", "test"):
        sentences.write(tmp_path, split, 1 if split == "train" else 50)
    monkeypatch.setenv("NEUROCODER_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(LabError, match="words that its training text does not have"):
        data.words("ptb")


def test_every_word_of_a_stream_is_predicted_once():
    text = streams(torch.arange(23), 2)
    assert text.tolist() == [[*range(11)], [*range(11, 22)]]
    pieces = [*segments(text, 4)]
    assert [word.shape[1] for word, _ in pieces] == [4, 4, 2]
    assert torch.cat([following for _, following in pieces], 1).equal(text[:, 1:])
    assert torch.cat([word for word, _ in pieces], 1).equal(text[:, :-1])


@pytest.mark.parametrize(("there", "between"), [(207, 15), (206, 15), (10, 5), (1, 15), (30, 15)])
def test_e_steps_reach_every_segment(there, between):
    count = reached_by_all(there, between)
    assert there - 5 < count <= there
    assert {step % count for step in range(0, between * count, between)} == {*range(count)}


def test_too_short_a_text_is_told(monkeypatch):
    monkeypatch.setattr(penn_treebank, "STEPS", 200)
    with pytest.raises(LabError, match="the training text is too short: it takes 25,728 words"):
        penn_treebank.Reader(EXPERIMENT.resolve(PennTreebank(budget="smoke")))


@pytest.mark.parametrize("row", [("em", 5, 1), ("reinforce", 15, 3), ("fixed", 3, 3)], ids=str)
def test_reading_on_from_a_state_is_reading_in_one_go(row):
    torch.manual_seed(0)
    model = WordModel(20, *row).eval()
    word, following = torch.randint(20, (2, 4, 9))
    whole, last = model(word, following, torch.zeros(4, 8))
    first, state = model(word[:, :5], following[:, :5], torch.zeros(4, 8))
    second, end = model(word[:, 5:], following[:, 5:], state)
    torch.testing.assert_close(first + second, whole)
    torch.testing.assert_close(end, last)
    assert not torch.allclose(model(word[:, 5:], following[:, 5:], torch.zeros(4, 8))[0], second)
    states, _ = model.gru(model.embedding(word), torch.zeros(1, 4, 8))
    logits = model.output(states)
    wanted = -torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
    torch.testing.assert_close(whole, wanted.view(4, 9).sum(1))


def test_sizes_of_table_1():
    """Embedding and output, gates, modules of 8 units; a controller where something is chosen."""
    outside = 10_000 * 32 + 10_000 * 9 + 41 * 16
    for method, modules, choices in ROWS:
        with torch.device("meta"):
            size = sum(p.numel() for p in WordModel(10_000, method, modules, choices).parameters())
        controller = 0 if method == "fixed" else 41 * modules * choices
        assert size == outside + modules * 41 * 8 + controller


def test_classes_of_words_and_what_modules_tell_of_them():
    vocabulary = ("the", "<unk>", "<eos>", "N", "a", *(f"w{n}" for n in range(1200)))
    text = torch.tensor([[0, 3, 2, 4, 1200, 1] * 50, [4, 0, 3, 2, 1100, 1] * 50])
    kinds = contexts.classes(text, vocabulary)
    assert kinds[0, :6].tolist() == [2, 0, 1, 4, 3, 3]
    seen = contexts.look(kinds[:, :-1], text, vocabulary)  # a module for each class
    assert seen["context_information"] == pytest.approx(1.0)
    assert seen["context_information_shuffled"] < 0.1
    assert [row[0] for row in seen["invoked_on"]] == [1, 2, 3, 4, 5]
    assert seen["invoked_on"][0][2:4] == ["number 100", "N"]
    assert "the [N] <eos>" in seen["invoked_on"][0][4]
    same = contexts.look(torch.zeros_like(kinds[:, :-1]), text, vocabulary)
    assert same["context_information"] == pytest.approx(0.0, abs=1e-9)
    assert len(same["invoked_on"]) == 1


def test_smoke_runs_and_what_is_shown_of_them(tmp_path):
    rows = [("em", 5, 1), ("em", 15, 1), ("reinforce", 5, 3), ("topk", 5, 1), ("fixed", 1, 1), ("fixed", 3, 3)]
    runs = Runs()
    for method, modules, choices in rows:
        config = PennTreebank(0, "smoke", method, modules, choices, iterations=16)
        runs.append(distilled(EXPERIMENT, config, tmp_path))
        final = runs[-1]["final"]
        assert 1 < final["test_perplexity"] < 100
        assert ("context_information" in final) == (method != "fixed" and choices == 1)
        assert final.get("context_information_untrained", 1) > 0  # a random controller tells something, too
        assert ("test_perplexity_single" in final) == (method == "topk")
        assert ("h_b" in final) == (method != "fixed")
        assert ("controller" in final) == (modules == 5 and choices == 1)
        assert ("e_steps" in final) == (method == "em")
    assert runs[0]["final"]["e_steps"] == 1.0  # two of them, for two segments a stream
    stages = runs[0]["final"]["controller"]
    assert [stage["step"] for stage in stages] == [0, 1, 4, 16]
    assert all(sum(row) == pytest.approx(1, abs=0.03) for stage in stages for row in stage["probability"])
    assert len(stages[0]["probability"]) == 70
    titles = [title.split(",")[0].split(":")[0] for title, _, _ in penn_treebank.tabulate(runs)]
    assert titles[:2] == ["Table 1", "Collapse"]
    assert titles[3:] == ["Table 2", "Table 2"]
    title, header, table_1 = penn_treebank.tabulate(runs)[0]
    assert title.endswith("; a segment had 1 E-steps of EM, a verdict takes 5")
    assert table_1[0][header.index("paper")] == "229.7"
    assert len(table_1) == len(rows)
    drawn = penn_treebank.draw(runs)
    assert sum(title.startswith("Fig 4") for title, _ in drawn) == 2
    assert sum(title.startswith("Fig 5") for title, _ in drawn) == 2  # EM and noisy top-k
    assert all(picture.startswith("<svg") for _, picture in drawn)


def test_it_learns_and_its_modules_do_too(tmp_path):
    """The text's words are told by grammar alone: perplexity falls far below the 45 words there are."""
    config = PennTreebank(modules=5, iterations=150, rate=0.03, m_steps=3)
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert final["test_perplexity"] < 20
    assert final["h_a"] < 0.9 * log(5)
    assert final["context_information"] > 10 * final["context_information_shuffled"]


def test_what_noisy_top_k_chooses_is_looked_at_while_it_mixes():
    """As its perplexity is: the state from which it chooses is that of the mixture."""
    torch.manual_seed(0)
    task = penn_treebank.Reader(EXPERIMENT.resolve(PennTreebank(method="topk", modules=5, iterations=9)))
    task.attach(Accelerator(cpu=True))
    for index in range(3):
        task.step(index)
    task.network.eval()
    with torch.no_grad():
        with routed(task.model, NoisyMixture(4, 0.0)), nc.trace(task.model) as mixed:
            task._forward(*task._batch())
        with nc.trace(task.model) as alone:
            task._forward(*task._batch())
        h_a = entropies(mixed)[0]
        assert task.evaluate()["h_a"] == h_a != entropies(alone)[0]
        probability = mixed.stacked("gru.candidate").probability[:, :2, 0].transpose(0, 1).flatten(0, 1)
        torch.testing.assert_close(task._controller(), probability)


@pytest.mark.parametrize("method", ["em", "reinforce"])
def test_stopped_and_resumed_it_is_the_same_run(tmp_path, monkeypatch, method):
    """With the stored choices, the carried state, what was seen on the way, and the moving average."""
    config = PennTreebank(method=method, modules=5, iterations=22, m_steps=4 if method == "em" else 15)
    final = same_when_stopped(EXPERIMENT, config, tmp_path, monkeypatch, at=13)
    assert len(final["controller"]) == 4


def test_an_iteration_can_be_timed_with_its_share_of_an_e_step(monkeypatch):
    monkeypatch.setattr(speed, "WORDS", 30)
    monkeypatch.setattr(penn_treebank, "BATCH", 4)
    found = speed.compare("penn-treebank", repeats=1, seed=0)
    assert {*found} == {*speed.TREEBANK}
    assert found["original"]["step_ratio"] == 1.0
    model, tried = WordModel(30, "em", 5, 1), []
    monkeypatch.setattr(ViterbiEM, "expect", lambda *given: tried.append(given) or time.sleep(0.3))
    spent = speed.reader(model, *speed.batch("penn-treebank"), "em")()
    assert len(tried) == 1
    assert 0.02 < spent < 0.3  # a fifteenth of it counts


def test_a_sweep_has_the_twelve_rows_and_rates_are_those_of_the_method(monkeypatch):
    assert len(grid(EXPERIMENT, EXPERIMENT.axes | EXPERIMENT.main, 1)) == 12
    asked = []
    monkeypatch.setattr(penn_treebank, "best", lambda *names, **place: asked.append(place) or 0.02)
    for method, modules, choices in (("em", 15, 3), ("topk", 5, 1), ("fixed", 3, 3)):
        assert EXPERIMENT.resolve(PennTreebank(method=method, modules=modules, choices=choices)).rate == 0.02
    assert [(*place.values(),) for place in asked] == [("em", 5, 3), ("topk", 5, 1), ("fixed", 1, 1)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--modules", "4"], "Table 1 has em with 1 of 15, 1 of 5, 3 of 15, 3 of 5 modules, not 1 of 4"),
        (["--method", "fixed"], "Table 1 has fixed with 1 of 1, 3 of 3 modules"),
        (["--rate", "-1"], "rate must be a positive number"),
        (["--m-steps", "0"], "m_steps must be at least 1"),
        (["--m-steps", "5", "--method", "topk"], "m_steps is for method em: topk has no E-steps"),
    ],
)
def test_wrong_use_is_told(tmp_path, capsys, words, said):
    assert main(["run", "penn-treebank", *words, "--runs", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
