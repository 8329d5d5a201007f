"""The trainer `a3c`: workers play and learn on their own, and share weights and RMSProp's squares without any lock.

Nothing that a worker could hold while it dies is waited for: it writes to the shared weights, and to a row of a board
that is its own; the learner reads. A worker that was killed is started again, one that failed ends the run. All of them
end with the learner, however that dies; those whose forkserver dies are killed, since no one would tell of their end.
"""

from __future__ import annotations

import copy
import os
import signal
import time
import traceback
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, multiprocessing, nn

from neurocoder_lab.actor_critic.agent import Agent, Work
from neurocoder_lab.actor_critic.learning import RMSProp, loss
from neurocoder_lab.actor_critic.playing import Player, seed_of
from neurocoder_lab.errors import LabError
from neurocoder_lab.signals import end_with, handling

PARTS = ("loss", "policy_loss", "value_loss", "entropy")
UPDATES, EPISODES, SCORE = range(len(PARTS), len(PARTS) + 3)  # columns of the board behind the sums of PARTS
ATTEMPTS = 3  # deaths of a worker in a row, without an update between them
PAUSE = 0.002  # seconds between looks at the board
PATIENCE = 10.0  # seconds until a forkserver that was killed is gone
UNTOLD = 255  # multiprocessing's exit code of a process, alive or not, whose forkserver died


class Shared(NamedTuple):
    """What all processes see. Of a board's rows each has one writer; `allowed` is written by the learner alone."""

    model: nn.Module
    squares: list[Tensor]
    board: Tensor  # a row a worker, counts since the learner started
    allowed: Tensor  # updates to make by now, all workers together
    before: int  # updates made before the learner started


class Asynchronous(Agent):
    """A step of the run is as many updates as it has environments, each from the rollout of one worker."""

    crew: Crew | None = None

    def attach(self, accelerator: Accelerator) -> None:
        if accelerator.num_processes > 1:
            raise LabError("a3c starts its workers itself, on one machine: use --trainer sync on several")
        if accelerator.mixed_precision != "no":
            raise LabError(f"workers of a3c know no {accelerator.mixed_precision}: leave --precision out, or use sync")
        super().attach(accelerator)

    def step(self, index: int) -> dict[str, Tensor]:
        if self.crew is None:  # now, since a resumed run has its weights by now
            self.crew = Crew(self.model, self.rule, self.work, index)
            self.earlier = self.played
        parts, updates = self.crew.advance(index)
        self.played = self.earlier + updates * self.work.settings.rollout
        return parts

    def now(self) -> nn.Module:
        """A copy: a worker that is on its way may still change the weights."""
        return copy.deepcopy(self.model)

    def recent(self) -> list[float]:
        return [] if self.crew is None else self.crew.recent()

    def close(self) -> None:
        if self.crew is not None:
            self.crew.close()


class Crew:
    """The workers, seen from the learner."""

    def __init__(self, model: nn.Module, optimiser: RMSProp, work: Work, index: int):
        self.work, self.seen = work, torch.zeros(len(PARTS) + 1, dtype=torch.float64)
        model.share_memory()
        squares = [optimiser.state[parameter]["square"].share_memory_() for parameter in optimiser.parameters()]
        board = torch.zeros(work.workers, SCORE + 1, dtype=torch.float64).share_memory_()
        allowed = torch.zeros((), dtype=torch.int64).share_memory_()
        self.shared = Shared(model, squares, board, allowed, index * work.environments)
        self.context: Any = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([__name__, "torch._dynamo"])
        self.alive, self._held = self.context.Pipe(duplex=False)  # the other end is closed when this process ends
        self.deaths, self.made_at_death = [0] * work.workers, [0.0] * work.workers
        self.running: dict[int, tuple[BaseProcess, Connection, int]] = {}
        for number in range(work.workers):
            self._start(number)

    def _start(self, number: int) -> None:
        receiver, sender = self.context.Pipe(duplex=False)
        made = self.shared.before + int(self.shared.board[:, UPDATES].sum())
        seed = seed_of(self.work.seed, made, number)
        process = self.context.Process(
            target=_worker, args=(number, seed, self.shared, self.work, sender, self.alive), daemon=True
        )
        _launch(process)
        sender.close()
        self.running[process.sentinel] = (process, receiver, number)

    def advance(self, index: int) -> tuple[dict[str, Tensor], int]:
        """Wait for the updates of one more step: means of what they say, and the updates made by this crew in all."""
        wanted = (index + 1) * self.work.environments
        self.shared.allowed.fill_(wanted)
        while self.shared.before + self.shared.board[:, UPDATES].sum() < wanted:
            for sentinel in wait([*self.running], timeout=PAUSE):
                self._mourn(*self.running.pop(sentinel))
        sums = self.shared.board[:, : UPDATES + 1].sum(0)
        new, self.seen = sums - self.seen, sums
        means = (new[:UPDATES] / new[UPDATES]).float()
        return dict(zip(PARTS, means, strict=True)), int(sums[UPDATES])

    def _mourn(self, process: BaseProcess, receiver: Connection, number: int) -> None:
        """Start a killed worker again; raise for one that failed, or that never comes to an update."""
        process.join()
        _kill(process)
        try:
            failure = receiver.recv_bytes().decode() if receiver.poll() else None
        except (EOFError, OSError):  # nothing was said, or it was cut short
            failure = None
        if failure is None:
            made = self.shared.board[number, UPDATES].item()
            self.deaths[number] = 1 if made > self.made_at_death[number] else self.deaths[number] + 1
            self.made_at_death[number] = made
            if self.deaths[number] < ATTEMPTS:
                return self._start(number)
            failure = f"it died {ATTEMPTS} times (code {process.exitcode}), perhaps for want of memory"
        raise LabError(f"a worker of a3c failed (the same command goes on from the last checkpoint): {failure}")

    def recent(self) -> list[float]:
        """The mean score of the last episodes of each worker that ended one."""
        return [row[SCORE].item() for row in self.shared.board if row[EPISODES] > 0]

    def close(self) -> None:
        for process, _, _ in self.running.values():
            _kill(process)
        for process, _, _ in self.running.values():
            process.join()


def _launch(process: BaseProcess) -> None:
    """Fork it, if need be from a new forkserver, once an old one that was killed is gone."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with handling(signal.SIG_IGN, signal.SIGINT):  # a terminal's ctrl-C reaches all: the learner ends the others
            forkserver.ensure_running()
        try:
            return process.start()
        except (ConnectionError, EOFError):
            if time.monotonic() > deadline:
                raise
            time.sleep(PAUSE)


def _kill(process: BaseProcess) -> None:
    """Unless it is known to have ended; it holds nothing."""
    if process.pid is not None and process.exitcode in (None, UNTOLD):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _worker(number: int, seed: int, shared: Shared, work: Work, answer: Connection, alive: Connection) -> None:
    """A process of its own; what goes wrong is said to the learner."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(alive)
    torch.set_num_threads(1)
    try:
        _learn(shared, shared.board[number], work, seed)
    except Exception:
        answer.send_bytes(traceback.format_exc().encode())


def _learn(shared: Shared, row: Tensor, work: Work, seed: int) -> None:
    """Algorithm S3 of Mnih et al. 2016: take the weights, play a rollout, add its gradient to the shared ones."""
    settings, total = work.settings, work.steps * work.environments
    optimiser = RMSProp(shared.model.parameters(), settings)
    for parameter, square in zip(optimiser.parameters(), shared.squares, strict=True):
        optimiser.state[parameter]["square"] = square
    local, player = copy.deepcopy(shared.model), Player(work.train(1), seed)
    while True:
        made = shared.before + shared.board[:, UPDATES].sum().item()
        if made >= shared.allowed:
            time.sleep(PAUSE)
            continue
        with torch.no_grad():
            for ours, theirs in zip(local.parameters(), shared.model.parameters(), strict=True):
                ours.copy_(theirs)
        rollout = player.rollout(local, settings.rollout)
        local.zero_grad()
        sum_of_steps, parts = loss(local, rollout, settings)
        sum_of_steps.backward()
        nn.utils.clip_grad_norm_(local.parameters(), settings.norm)
        for ours, theirs in zip(local.parameters(), shared.model.parameters(), strict=True):
            theirs.grad = ours.grad
        optimiser.anneal(settings.rate_at(made / total))
        optimiser.step()
        row[:UPDATES] += torch.stack([parts[name] for name in PARTS]).double()
        if player.scores:
            row[EPISODES], row[SCORE] = len(player.scores), sum(player.scores) / len(player.scores)
        row[UPDATES] += 1  # last: with it the rollout counts
