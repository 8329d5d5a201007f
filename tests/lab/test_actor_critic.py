"""Actor-critic learning: returns by a loop, ends inside of a rollout, two trainers, and what kills them."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import active_children, forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("gymnasium", reason="needs the extra atari")

import neurocoder as nc
from neurocoder_lab.actor_critic.a3c import UPDATES, Crew
from neurocoder_lab.actor_critic.learning import RMSProp, Rollout, Settings, loss, returns
from neurocoder_lab.actor_critic.playing import Player, play, seed_of
from neurocoder_lab.errors import LabError
from neurocoder_lab.networks import ActorCritic
from neurocoder_lab.run import execute, folder_of
from tests.lab.cue import BLANK, EXPERIMENT, TRAINERS, CueConfig, make, start

ROOT = Path(__file__).parents[2]


def agent(seed: int = 0) -> ActorCritic:
    torch.manual_seed(seed)
    return ActorCritic(nn.Sequential(nn.Linear(2, 8), nn.Tanh()), 8, 2, hidden=6).double()


def drawn(steps: int = 7, environments: int = 3) -> Rollout:
    """A rollout with ends of both kinds at its beginning, inside, and at its end."""
    torch.manual_seed(1)
    over, lost = (torch.zeros(steps, environments, dtype=torch.bool) for _ in range(2))
    over[0, 0] = over[3, 0] = over[3, 1] = over[-1, 2] = True
    lost[2, 1] = lost[-1, 1] = True
    fresh = torch.cat((torch.tensor([[False, True, False]]), over[:-1]))
    state = tuple(torch.randn(1, environments, 6, dtype=torch.float64) for _ in range(2))
    seen = torch.randn(steps, environments, 2, dtype=torch.float64)
    action, reward = torch.randint(2, (steps, environments)), 3 * torch.randn(steps, environments, dtype=torch.float64)
    return Rollout(seen, action, reward, fresh, over, lost, state, torch.randn(environments, dtype=torch.float64))


def by_hand(model: ActorCritic, data: Rollout, settings: Settings) -> torch.Tensor:
    """The loss by plain loops over environments and steps: every return is a sum of rewards up to what ends it."""
    total, steps = torch.zeros((), dtype=torch.float64), len(data.reward_TN)
    for n in range(data.reward_TN.shape[1]):
        hidden, cell = data.state[0][:, n], data.state[1][:, n]
        for t in range(steps):
            if data.fresh_TN[t, n]:
                hidden, cell = torch.zeros_like(hidden), torch.zeros_like(cell)
            out, (hidden, cell) = model.lstm(model.torso(data.seen_TN[t, n])[None], (hidden, cell))
            gain, weight = 0.0, 1.0
            for later in range(t, steps):
                gain += weight * max(-1.0, min(1.0, data.reward_TN[later, n].item()))
                weight *= settings.discount
                if data.over_TN[later, n] or (settings.lives and data.lost_TN[later, n]):
                    break
            else:
                gain += weight * data.last_N[n].item()
            value, logs = model.value(out[0])[0], model.policy(out[0]).log_softmax(-1)
            total = total - (gain - value.item()) * logs[data.action_TN[t, n]]
            total = total + settings.value * (gain - value) ** 2 + settings.entropy * (logs.exp() * logs).sum()
    return total


@pytest.mark.parametrize("lives", [True, False])
def test_the_loss_is_that_of_loops_with_ends_inside_of_a_rollout(lives):
    model, data, settings = agent(), drawn(), Settings(lives=lives)
    fast, slow = loss(model, data, settings)[0], by_hand(model, data, settings)
    torch.testing.assert_close(fast, slow)
    wanted = torch.autograd.grad(slow, [*model.parameters()])
    torch.testing.assert_close(torch.autograd.grad(fast, [*model.parameters()]), wanted)
    nobody = data._replace(over_TN=torch.zeros_like(data.over_TN))
    assert not torch.allclose(loss(model, nobody, settings)[0], slow)


def test_program_memories_count_once_a_rollout():
    model, data = agent(), drawn()
    nc.recode(model, ["policy", "value"], slots=8, heads=4, key_dim=3, residual=True)
    plain, more = (loss(model, data, Settings(orthogonal=weight))[0] for weight in (0.0, 0.5))
    torch.testing.assert_close(more - plain, 0.5 * 3 * nc.orthogonality(model))


def test_returns_solved_by_hand():
    reward = torch.tensor([[1.0], [0.0], [2.0], [4.0]])
    end = torch.tensor([[False], [True], [False], [False]])
    assert returns(reward, end, torch.tensor([8.0]), 0.5).flatten().tolist() == [1.0, 0.0, 6.0, 8.0]


def test_an_episode_forgets_the_one_before_it():
    model, data = agent(), drawn()
    whole, values, _ = model(data.seen_TN, data.state, data.fresh_TN)
    tail, _, _ = model(data.seen_TN[4:, :1], None, data.fresh_TN[4:, :1])
    torch.testing.assert_close(whole[4:, :1], tail)  # environment 0 began anew at step 4
    one, state = [], data.state
    for t in range(len(values)):
        logits, _, state = model(data.seen_TN[t : t + 1], state, data.fresh_TN[t : t + 1])
        one.append(logits)
    torch.testing.assert_close(torch.cat(one), whole)  # as it plays, so it learns
    assert not torch.allclose(model(data.seen_TN, data.state, torch.zeros_like(data.fresh_TN))[0], whole)


def test_rmsprop_is_that_of_the_paper():
    weight, gradient = nn.Parameter(torch.tensor([1.0, -2.0])), torch.tensor([0.5, 4.0])
    optimiser = RMSProp([weight], Settings(rate=0.1, decay=0.9, epsilon=0.01))
    square, wanted = torch.zeros(2), weight.detach().clone()
    for rate in (0.1, 0.05):
        optimiser.anneal(rate)
        weight.grad = gradient.clone()
        optimiser.step()
        square = 0.9 * square + 0.1 * gradient**2
        wanted -= rate * gradient / (square + 0.01).sqrt()
    torch.testing.assert_close(weight.detach(), wanted)
    assert [Settings(rate=1.0).rate_at(share) for share in (0, 0.25, 1, 1.5)] == [1, 0.75, 0, 0]


def test_a_player_goes_on_from_rollout_to_rollout():
    torch.manual_seed(0)
    model = agent().float()
    once, twice = Player(make(3), seed=5), Player(make(3), seed=5)
    whole, parts = once.rollout(model, 12), [twice.rollout(model, 5), twice.rollout(model, 7)]
    for name in ("seen_TN", "action_TN", "reward_TN", "fresh_TN", "over_TN"):
        together = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(getattr(whole, name), together), name
    assert whole.fresh_TN[:, 0].nonzero().flatten().tolist() == [0, 4, 8]
    assert whole.over_TN[:, 0].nonzero().flatten().tolist() == [BLANK, 2 * BLANK + 1, 3 * BLANK + 2]
    assert len(once.scores) == 9
    assert sum(once.scores) == whole.reward_TN.sum()
    assert whole.state is None
    assert not torch.equal(parts[1].state[0], twice.rollout(model, 1).state[0])


def test_episodes_are_fixed_by_their_seed():
    model = agent().float()
    first, again, other = (play(model, Player(make(20), seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert {*first} == {0.0, 5.0}
    assert len({seed_of(*numbers) for numbers in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))}) == 4


@pytest.mark.parametrize(("trainer", "recoded"), [("sync", False), ("a3c", False), ("sync", True)])
def test_a_game_that_takes_a_memory_is_solved(tmp_path, trainer, recoded):
    config = CueConfig(trainer=trainer, recoded=recoded, iterations=150 if trainer == "sync" else 100)
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    per_step = final["environment_steps"] / final["steps"]
    assert final["score"] > 4.5  # 5 is all there is, 2.5 is chance and all that can be had without a memory
    assert final["train_score"] > 4
    assert per_step == pytest.approx(80, abs=0 if trainer == "sync" else 1)  # workers on their way go on to the end
    assert final["frames"] == 4 * final["environment_steps"]


@pytest.mark.parametrize("trainer", ["sync", "a3c"])
def test_a_stopped_run_goes_on_with_weights_optimiser_and_counts(tmp_path, monkeypatch, trainer):
    config, noted = CueConfig(trainer=trainer, iterations=8), []
    kind = TRAINERS[trainer]
    step = kind.step

    def noting(self, index):
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        squares = [self.rule.state[parameter]["square"].clone() for parameter in self.model.parameters()]
        noted.append((index, self.played, weights + squares, self.earlier_scores))
        if len(noted) == 6:
            raise KeyboardInterrupt
        return step(self, index)

    monkeypatch.setattr(kind, "step", noting)
    with pytest.raises(KeyboardInterrupt):
        execute(EXPERIMENT, config, tmp_path, checkpoint_seconds=0, quiet=True)
    assert not active_children()
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    stopped, resumed = noted[5:7]
    assert stopped[:2] == resumed[:2]
    assert stopped[0] == 5
    assert len(resumed[3]) > 0 == len(stopped[3])
    if trainer == "sync":  # workers on their way change theirs behind a checkpoint
        assert all(torch.equal(a, b) for a, b in zip(stopped[2], resumed[2], strict=True))
    assert all(tensor.any() for tensor in resumed[2])
    assert final["environment_steps"] >= 8 * 80
    log = (folder_of(EXPERIMENT, config, tmp_path) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [2, 4, 6, 8]


def crew(train=make, workers: int = 2) -> Crew:
    task = start(CueConfig(trainer="a3c", iterations=50, workers=workers))
    return Crew(task.model, task.rule, replace(task.work, train=train), 0)


def test_a_worker_that_is_killed_is_replaced_and_the_others_do_not_wait():
    with closing(crew()) as mine:
        mine.advance(0)
        process, _, number = next(iter(mine.running.values()))
        os.kill(process.pid, signal.SIGKILL)
        made = mine.shared.board[number, UPDATES].item()
        for index in range(1, 50):
            parts, updates = mine.advance(index)
            if mine.shared.board[number, UPDATES] > made + 2:  # its successor counts on
                break
            time.sleep(0.05)
        else:
            pytest.fail("nobody took its place")
        assert process.pid not in [other.pid for other, _, _ in mine.running.values()]
        assert len(mine.running) == 2
        assert updates >= 8 * (index + 1)
        assert all(part.isfinite() for part in parts.values())
    assert not active_children()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_workers_whose_forkserver_is_killed_are_replaced():
    """They live on, and hold what the learner listens to."""
    with closing(crew()) as mine:
        mine.advance(0)
        before = {process.pid for process, _, _ in mine.running.values()}
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while any(map(running, before)) and time.monotonic() < deadline:
            mine.advance(int(mine.shared.board[:, UPDATES].sum()) // 8)
        assert not any(map(running, before))
        assert len(mine.running) == 2
        mine.advance(int(mine.shared.board[:, UPDATES].sum()) // 8 + 1)
    assert not active_children()


def dying(count: int):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("train", "said"), [(dying, "died 3 times .code -9."), (partial(make, fail=True), "RuntimeError: the game broke")]
)
def test_workers_that_cannot_work_end_the_run(train, said):
    with closing(crew(train, workers=1)) as mine, pytest.raises(LabError, match=said):
        mine.advance(0)
    assert not active_children()


def descendants(pid: int) -> set[int]:
    found = {pid}
    for _ in range(3):  # the learner, what it forks its workers from, the workers
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                number, parent = stat.parent.name, stat.read_text().rpartition(")")[2].split()[1]
                found |= {int(number)} if int(parent) in found else set()
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_the_learner_killed_leaves_no_process_behind_and_the_run_goes_on(tmp_path):
    words = [sys.executable, "-m", "tests.lab.cue", str(tmp_path), "a3c", "40"]
    learner = subprocess.Popen(words, cwd=ROOT)
    config = CueConfig(trainer="a3c", iterations=40)
    folder = folder_of(EXPERIMENT, config, tmp_path)
    while not [*(folder / "checkpoints").glob("step-*")]:
        assert learner.poll() is None
        time.sleep(0.01)
    everyone = descendants(learner.pid)
    assert len(everyone) >= 4  # with two workers, and what they are forked from
    learner.kill()
    learner.wait()
    deadline = time.monotonic() + 20
    while (left := [pid for pid in everyone if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    final = execute(EXPERIMENT, config, tmp_path, quiet=True)["final"]
    assert final["steps"] == 40
    assert final["environment_steps"] >= 40 * 80


def test_two_processes_have_the_losses_of_one(tmp_path):
    config = CueConfig(iterations=4)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    runs = [tmp_path / "one", tmp_path / "two"]
    done = subprocess.run([*words, "-m", "tests.lab.cue", str(runs[1]), "sync", "4"], capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
    execute(EXPERIMENT, config, runs[0], quiet=True)
    one, two = ((folder_of(EXPERIMENT, config, some) / "metrics.jsonl").read_text().splitlines() for some in runs)
    assert len(one) == len(two) == 4
    for a, b in zip(map(json.loads, one), map(json.loads, two), strict=True):
        assert a == pytest.approx(b, rel=1e-4)  # float32 sums in another order
    assert "score" in a


@pytest.mark.parametrize(
    ("trainer", "processes", "said"),
    [("a3c", 2, "use --trainer sync on several"), ("sync", 3, "8 environments cannot be shared evenly by 3")],
)
def test_processes_that_a_trainer_cannot_use_are_refused(trainer, processes, said):
    several = SimpleNamespace(num_processes=processes)
    with pytest.raises(LabError, match=said):
        start(CueConfig(trainer=trainer, iterations=1)).attach(several)
