"""The experiment atari: what an agent sees of a real game, runs of every kind, figures, a film, and what is missing."""

import builtins
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from shutil import copytree

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("ale_py", reason="needs the extra atari")

import neurocoder as nc
from neurocoder_lab import film, run, throughput
from neurocoder_lab.actor_critic import games
from neurocoder_lab.actor_critic.agent import MEASURED
from neurocoder_lab.actor_critic.games import ABOUT, GAMES
from neurocoder_lab.actor_critic.inside import watch
from neurocoder_lab.actor_critic.playing import Player, play
from neurocoder_lab.cli import main
from neurocoder_lab.experiments import atari
from neurocoder_lab.experiments.atari import EXPERIMENT, TESTED, Atari, build, start
from neurocoder_lab.results import Runs
from neurocoder_lab.run import execute, folder_of
from neurocoder_lab.sweep import _distilled, grid

TINY = {"budget": "smoke", "environments": 2, "frames": 320}


def taken(environment, actions, seed=3):
    """All that an environment gives for these actions."""
    seen, about = environment.reset(seed=seed)
    rows = [(seen, None, None, about)]
    for action in actions:
        seen, reward, ended, cut, about = environment.step(np.full(environment.num_envs, action))
        rows.append((seen, reward, ended | cut, about))
    return rows


@pytest.mark.parametrize("game", GAMES)
def test_every_game_is_there_with_its_actions(game):
    with torch.device("meta"):
        assert build("a3c", game).policy.out_features == ABOUT[game].actions
    assert games.make(game, 0.0, 1).single_action_space.n == ABOUT[game].actions


def test_four_frames_a_step_and_a_stack_of_the_last_four_steps():
    rows = taken(games.make("seaquest", 0.0, 2), [1, 5, 3, 2, 0, 4] * 4)
    assert rows[0][0].shape == (2, 4, 84, 84)
    assert rows[0][0].dtype == np.uint8
    numbers = [row[3]["frame_number"] for row in rows]
    assert all((later - earlier == games.SKIP).all() for earlier, later in pairwise(numbers))
    for (before, *_), (after, *_) in pairwise(rows[4:]):
        assert np.array_equal(before[:, 1:], after[:, :-1])
        assert not np.array_equal(before[:, -1], after[:, -1])
    assert 1 <= numbers[0].min() <= numbers[0].max() <= 30 + games.SKIP


def test_what_is_seen_is_the_screen_in_gray():
    """Shrunk and made gray by hand: bytes agree up to how the pixels of a shrunken picture are weighed."""
    gray, colour = (taken(games.make("seaquest", 0.0, 1, colour=c), [2, 3, 4] * 8) for c in (False, True))
    for (seen, *_), (screen, *_) in zip(gray[8:], colour[8:], strict=True):
        assert screen.shape == (1, 1, 210, 160, 3)
        image = Image.fromarray(screen[0, 0]).convert("L").resize((84, 84), Image.Resampling.BOX)
        assert np.abs(np.asarray(image, float) - seen[0, -1]).mean() < 4


def test_seeds_and_sticky_actions():
    actions = [3, 4, 5, 2] * 12

    def last(sticky, seed):
        return taken(games.make("seaquest", sticky, 1), actions, seed)[-1][0]

    assert np.array_equal(last(0.25, 1), last(0.25, 1))
    assert not np.array_equal(last(0.25, 1), last(0.0, 1))
    assert not np.array_equal(last(0.0, 1), last(0.0, 2))


def test_an_episode_that_is_cut_begins_anew_in_the_same_step_and_rewards_are_true():
    rows = taken(games.make("mspacman", 0.0, 1, longest=400), [1, 2, 3, 4] * 40)
    over = [bool(row[2]) for row in rows[1:]]
    assert sum(over) >= 1
    at = over.index(True) + 1
    assert rows[at][3]["episode_frame_number"] <= 30 + games.SKIP  # of the new one
    assert {row[1].item() for row in rows[1:]} >= {0.0, 10.0}


def test_lost_lives_and_true_scores():
    torch.manual_seed(0)
    player = Player(games.make("seaquest", 0.0, 4), seed=0)
    model, lives = build("random", "seaquest"), []
    rollout = player.rollout(model, 260)
    assert rollout.lost_TN.any()  # a diver without skill does not live long
    assert not (rollout.lost_TN & rollout.over_TN).any()
    assert rollout.reward_TN.max() >= 20
    again = Player(games.make("seaquest", 0.0, 4), seed=0)
    for action_N in rollout.action_TN:
        lives.append(again.lives_N.copy())
        again.step(action_N)
    fell = torch.from_numpy(np.diff(np.stack(lives), axis=0) < 0)
    assert torch.equal(rollout.lost_TN[:-1], fell & ~rollout.over_TN[:-1])
    assert sum(player.scores) + player.score_N.sum() == rollout.reward_TN.sum()


def test_agents_have_the_papers_heads_and_sizes():
    sizes = {}
    for torso in ("small", "wide"):
        for model in ("a3c", "hypernet", "neurocoder"):
            with torch.device("meta"):
                sizes[torso, model] = sum(p.numel() for p in build(model, "seaquest", torso).parameters())
    assert sizes["small", "a3c"] == pytest.approx(2.3e6, rel=0.02)
    for model, size in (("a3c", 3.2e6), ("hypernet", 3.6e6), ("neurocoder", 3.3e6)):
        assert sizes["wide", model] == pytest.approx(size, rel=0.06)  # Table 7
    layer = build("neurocoder", "seaquest").policy
    assert isinstance(layer, nc.Linear)
    assert (layer.slots, layer.steps, layer.heads, layer.key_dim, layer.least_used) == (80, 1, 15, 3, 5)
    assert layer.residual is not None
    wide = build("a3c", "mspacman", "wide")
    state = tuple(torch.zeros(1, 2, 512) for _ in range(2))
    logits, values, _ = wide(
        torch.zeros(3, 2, 4, 84, 84, dtype=torch.uint8), state, torch.zeros(3, 2, dtype=torch.bool)
    )
    assert (logits.shape, values.shape) == ((3, 2, 9), (3, 2))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """A run of each kind, as a sweep would distil it."""
    runs, folder = Runs(), tmp_path_factory.mktemp("runs")
    for place in (
        {"model": "neurocoder"},
        {"model": "a3c"},
        {"model": "hypernet", "trainer": "a3c"},
        {"model": "random"},
    ):
        config = Atari(**place, **TINY)
        execute(EXPERIMENT, config, folder, quiet=True)
        runs.append(_distilled(EXPERIMENT, config, folder))
    return runs, folder


def test_a_run_ends_with_what_it_measures(smoke):
    ours, plain, hyper, random = (run["final"] for run in smoke[0])
    for final in (ours, plain, hyper, random):
        assert {*EXPERIMENT.metrics} <= final.keys()
        assert final["score"] == pytest.approx(np.mean(final["scores"]))
        assert final["frames"] == 4 * final["environment_steps"]
    assert ours["frames"] == plain["frames"] == 320
    assert hyper["frames"] >= 320
    assert random["frames"] == 0
    assert sum(ours["programs"][0]["use"][0]) == pytest.approx(1, abs=0.05)  # rounded
    assert "programs" not in plain


def test_a_random_agent_scores_as_published():
    scores = play(build("random", "mspacman"), Player(games.make("mspacman", 0.0, 6), seed=0))
    assert 100 < np.mean(scores) < 400  # Wang et al. 2016: 307; others measured 210 to 300


def test_random_agents_of_other_seeds_act_otherwise_in_the_same_games():
    config = EXPERIMENT.resolve(Atari(model="random", game="mspacman"))
    agents = [start(replace(config, seed=seed)) for seed in (0, 0, 1)]
    for agent in agents:
        agent.work = replace(agent.work, test=partial(games.make, "mspacman", 0.0, longest=1200))
    first, again, other = (agent.scores(MEASURED, 4) for agent in agents)
    assert first == again != other
    assert torch.equal(*(agent.measured(agent.work.test(1)).seen_N for agent in agents[1:]))


def test_what_is_watched_is_the_first_measured_episode(smoke):
    runs, folder = smoke
    config = EXPERIMENT.resolve(Atari(model="neurocoder", **TINY))
    agent = start(config)
    nc.load(agent.model, folder_of(EXPERIMENT, config, folder) / "model.safetensors")
    player = agent.measured(agent.work.test(1))
    moments = [*watch(agent.model, player)]
    assert len(moments) == TESTED["smoke"] // games.SKIP
    assert [*player.scores] == runs[0]["final"]["scores"][:1]
    both, actions = agent.measured(agent.work.test(2)), []
    with torch.no_grad():
        for _ in moments:
            actions.append(both.act(agent.model))
            both.step(actions[-1])
    assert [action[0] for action in actions] == [moment.action[0] for moment in moments]


def test_tables_and_figures(smoke):
    tables = atari.tabulate(smoke[0])
    assert [title.partition(":")[0] for title, _, _ in tables] == [
        "Seaquest, a3c, 320 frames, shortened", "Seaquest, sync, 320 frames, shortened",
    ]  # fmt: skip
    for _, header, rows in tables:
        assert all(len(row) == len(header) for row in rows)
        assert rows[-1][0] == "random"
    assert [row[0] for row in tables[1][2]] == ["A3C", "Neurocoder", "random"]
    titles = [title for title, svg in atari.draw(smoke[0]) if svg.startswith("<svg")]
    assert [title[:9] for title in titles] == ["Fig 7, Se"] * 4 + ["Neurocode"]


def test_a_film_shows_the_programs(smoke, tmp_path):
    _, folder = smoke
    run = folder_of(EXPERIMENT, Atari(model="neurocoder", **TINY), folder)
    out = film.film(run, tmp_path / "game.gif", length=6)
    with Image.open(out) as image:
        assert image.n_frames == 3
    swept = copytree(run, tmp_path / "swept", ignore=lambda *_: ["model.safetensors", "checkpoints"])  # on a cluster
    for words, said in (
        ((folder_of(EXPERIMENT, Atari(model="a3c", **TINY), folder), tmp_path / "a.gif"), "no programs to show"),
        ((run, tmp_path / "game.mp4"), "a film is a GIF"),
        ((swept, tmp_path / "a.gif"), "has no model.safetensors"),
        ((tmp_path, tmp_path / "a.gif"), "no folder of a finished run"),
    ):
        with pytest.raises(film.LabError, match=said):
            film.film(*words)


def test_what_is_asked_for_is_filled_in():
    def full(**settings):
        config = EXPERIMENT.resolve(Atari(**settings))
        return config.frames, config.workers, config.torso

    assert full(budget="paper") == (128_000_000, 16, "wide")
    assert full(budget="paper", game="frostbite") == (1_200_000_000, 16, "wide")
    assert full()[1:] == (2, "small")
    assert len(grid(EXPERIMENT, EXPERIMENT.axes | EXPERIMENT.main, 3)) == 3 * 2 * 4
    assert len(grid(EXPERIMENT, EXPERIMENT.axes, 1)) == 4 * (4 + 3)  # a random agent has no trainer
    task = start(EXPERIMENT.resolve(Atari(**TINY)))
    assert (task.steps, task.work.settings.orthogonal) == (2, 0.1)


def test_speed_is_told_by_agent():
    rates, of_random, of_plain, steps = throughput.figures(repeats=1, environments=2).values()
    assert [*rates] == ["at random", "A3C", "HyperNet", "Neurocoder"]
    assert of_random["A3C"] == pytest.approx(rates["A3C"] / rates["at random"], rel=0.01)  # both are rounded
    assert of_random["A3C"] < 1
    assert of_plain["Neurocoder"] == pytest.approx(rates["Neurocoder"] / rates["A3C"], rel=0.01)
    assert [*steps] == ["A3C ms", "HyperNet", "Neurocoder"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sticky", "1"], "sticky must be a probability below 1, got 1.0"),
        (["--model", "random", "--trainer", "a3c"], "a random agent learns nothing"),
        (["--frames", "0"], "frames must be at least 1"),
        (["--workers", "3"], "sync has no workers"),
        (["--rate", "-1"], "rate must be a positive number"),
    ],
)
def test_wrong_use_is_told(tmp_path, capsys, words, said):
    assert main(["run", "atari", *words, "--runs", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


def test_a_precision_that_is_refused_is_not_that_of_the_folder(tmp_path):
    """In a process of its own: accelerate has one precision in each."""
    words = ["run", "atari", "--trainer", "a3c", "--budget", "smoke", "--precision", "bf16", "--runs", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "neurocoder_lab", *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert "workers of a3c know no bf16" in done.stderr
    assert not [*tmp_path.rglob("config.json")]


@pytest.mark.parametrize(("trainer", "cpu"), [("a3c", True), ("sync", False)])
def test_a3c_leaves_an_accelerator_alone(tmp_path, monkeypatch, trainer, cpu):
    class Asked(Exception):
        pass

    def ask(**settings):
        raise Asked(settings["cpu"])

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(run, "Accelerator", ask)
    with pytest.raises(Asked, match=str(cpu)):
        execute(EXPERIMENT, Atari(trainer=trainer, **TINY), tmp_path)


def test_a_missing_extra_is_named(tmp_path, capsys, monkeypatch):
    there = builtins.__import__

    def without(name, *rest):
        if name.startswith("ale_py"):
            raise ImportError("No module named 'ale_py'")
        return there(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["run", "atari", "--budget", "smoke", "--runs", str(tmp_path)]) == 1
    assert "pip install 'neurocoder[lab,atari]'" in capsys.readouterr().err
