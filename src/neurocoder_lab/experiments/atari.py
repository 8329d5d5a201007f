"""Atari (Fig 7 of Neurocoder): actor-critic agents whose policy and value are plain, of a HyperNet, or composed.

    neurocoder run atari --game seaquest --model neurocoder
    neurocoder sweep atari --seeds 3                               Seaquest and Ms. Pac-Man, all agents
    neurocoder run atari --trainer a3c --workers 16 --budget paper
    python -m neurocoder_lab.film runs/atari/<name>/seed-0 game.gif

An agent sees and acts once in four frames of the emulator: a step is four frames. It learns from lives, and from
rewards cut to -1 to 1; its scores are the game's own. docs/paper.md has what the paper leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor, nn

import neurocoder as nc
from neurocoder_lab import figures
from neurocoder_lab.actor_critic import games
from neurocoder_lab.actor_critic.a3c import Asynchronous
from neurocoder_lab.actor_critic.agent import Agent, Work
from neurocoder_lab.actor_critic.games import ABOUT, GAMES, LONGEST, SKIP, STACK, Game
from neurocoder_lab.actor_critic.inside import EVERY
from neurocoder_lab.actor_critic.learning import Settings
from neurocoder_lab.actor_critic.sync import Synchronous
from neurocoder_lab.errors import LabError
from neurocoder_lab.networks import ActorCritic, State, small_torso, wide_torso
from neurocoder_lab.results import Runs, deviation, spread
from neurocoder_lab.task import Budget, Config, Experiment, Picture, Table

Model = Literal["a3c", "hypernet", "neurocoder", "random"]
Trainer = Literal["sync", "a3c"]
Torso = Literal["small", "wide"]
MODELS: tuple[Model, ...] = Model.__args__
TRAINERS: tuple[Trainer, ...] = Trainer.__args__
NAMES = {"a3c": "A3C", "hypernet": "HyperNet", "neurocoder": "Neurocoder", "random": "random"}

HEADS: dict[str, dict[str, Any]] = {  # Tables 5 and 6 of the paper
    "hypernet": {"layer": nc.peers.HyperLinear},
    "neurocoder": {"slots": 80, "heads": 15, "key_dim": 3, "least_used": 5, "residual": True},
}
ORTHOGONAL = 0.1
TORSOS = {"small": (small_torso, 256), "wide": (wide_torso, 1024)}
FRAMES = {"smoke": 2 * 1280, "desk": 2_048_000}
LEARNED = ("seaquest", "mspacman")  # by all agents of the paper, in 32 million steps; the other games have 300 million
EVALUATIONS = 20
EPISODES = {"smoke": (2, 2), "desk": (5, 30), "paper": (10, 100)}
TESTED = {"smoke": 200, "desk": 18_000, "paper": LONGEST}  # frames of a measured episode, at most


@dataclass(frozen=True)
class Atari(Config):
    """An Atari game by an actor-critic agent."""

    game: Game = "seaquest"
    """Which game."""
    model: Model = "neurocoder"
    """What the agent's policy and value are; random: an agent that never learns."""
    trainer: Trainer = "sync"
    """sync: all environments at once, one learner; a3c: workers that share weights, as in the paper, on the CPU."""
    frames: int | None = None
    """Frames of the emulator to learn from; a step of the agent is four."""
    environments: int = 16
    """Rollouts of a step of the run: sync plays so many at once, and learns from all of them together."""
    workers: int | None = None
    """Processes of a3c: by default 2, of budget paper 16."""
    torso: Torso | None = None
    """small: A3C's convolutions, 2.3M parameters in all; wide (budget paper): those that give the paper's 3.2M."""
    rate: float = Settings.rate
    """Of RMSProp; it falls to zero."""
    sticky: float = 0.0
    """Probability that the emulator repeats the last action instead of the agent's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("frames", "environments", "workers")
        self.check_positive("rate")
        if not 0 <= self.sticky < 1:
            raise LabError(f"sticky must be a probability below 1, got {self.sticky}")
        if self.model == "random" and self.trainer != "sync":
            raise LabError("a random agent learns nothing: there is no trainer to choose, leave --trainer out")
        if self.trainer == "sync" and self.workers not in (None, _workers(self.budget)):
            raise LabError("sync has no workers, but --environments: leave --workers out, or use --trainer a3c")

    @property
    def on_cpu(self) -> bool:
        return self.trainer == "a3c"


def _workers(budget: Budget) -> int:
    return 16 if budget == "paper" else 2


def fill(config: Atari) -> dict[str, Any]:
    published = SKIP * (32_000_000 if config.game in LEARNED else 300_000_000)
    return {
        "frames": FRAMES.get(config.budget, published),
        "workers": _workers(config.budget),
        "torso": "wide" if config.budget == "paper" else "small",
    }


class Uniform(nn.Module):
    """The random agent: all actions are as good."""

    def __init__(self, actions: int):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(actions))

    def forward(self, seen_TN: Tensor, state: State | None, fresh_TN: Tensor) -> tuple[Tensor, Tensor, State | None]:
        return self.logits.expand(*fresh_TN.shape, -1), torch.zeros(fresh_TN.shape), state


def build(model: Model, game: Game, torso: Torso = "small") -> nn.Module:
    """The agent's network, of which the policy and the value are re-coded, each with a memory of its own."""
    actions = ABOUT[game].actions
    if model == "random":
        return Uniform(actions)
    layers, features = TORSOS[torso]
    network = ActorCritic(layers(STACK), features, actions)
    if model in HEADS:
        nc.recode(network, ["policy", "value"], **HEADS[model])
    return network


def start(config: Atari) -> Agent:
    make = partial(games.make, config.game, config.sticky)
    make(1).close()  # what is missing is said before anything is built
    frames = config.environments * Settings.rollout * SKIP  # of a step of the run
    steps = 1 if config.model == "random" else -(-int(config.frames) // frames)
    work = Work(
        train=make,
        test=partial(make, longest=TESTED[config.budget]),
        settings=Settings(rate=config.rate, orthogonal=ORTHOGONAL if config.model == "neurocoder" else 0.0),
        steps=steps,
        evaluate_every=max(steps // EVALUATIONS, 1),
        seed=config.seed,
        environments=config.environments,
        workers=int(config.workers),
        episodes=EPISODES[config.budget],
    )
    kind = Agent if config.model == "random" else {"sync": Synchronous, "a3c": Asynchronous}[config.trainer]
    return kind(build(config.model, config.game, config.torso), work)


def _about(run: dict[str, Any]) -> str:
    config = run["config"]
    length = f"{config['frames']:,} frames" + ("" if config["budget"] == "paper" else ", shortened")
    sticky = f", sticky actions {config['sticky']:g}" if config["sticky"] else ""
    return f"{ABOUT[config['game']].title}, {config['trainer']}, {length}{sticky}"


def _comparable(runs: Runs) -> list[tuple[Runs, Runs]]:
    """Agents that can be compared, of the same game, trainer and length, and the random ones of that game."""
    keys = ("game", "trainer", "frames", "sticky", "budget")
    trained = Runs(run for run in runs if run["config"]["model"] != "random")
    places = sorted({tuple(run["config"][key] for key in keys) for run in trained})
    chosen = [dict(zip(keys, place, strict=True)) for place in places]
    return [
        (
            trained.where(**place),
            runs.where(model="random", **{key: place[key] for key in ("game", "sticky", "budget")}),
        )
        for place in chosen
    ]


LIVES = [f"{count} {'life' if count == 1 else 'lives'}" for count in range(10)]  # that are left


def draw(runs: Runs) -> list[Picture]:
    """Fig 7: scores against frames, of episodes that are always the same, and of those in training."""
    pictures = []
    for mine, chance in _comparable(runs):
        for metric, told in (("score", "mean of the same episodes"), ("train_score", "last episodes in training")):
            lines = {}
            for model in MODELS:
                curve = mine.where(model=model).curve(metric)
                if curve is not None:
                    ends = mine.where(model=model)[0]["curve"]["frames"]
                    lines[NAMES[model]] = (ends, *curve[1:])
            level = chance.values("score")
            if level and lines:
                frames = next(iter(lines.values()))[0]
                lines["random"] = ([0, frames[-1]], [mean(level)] * 2, [deviation(level)] * 2)
            title = f"Fig 7, {_about(mine[0])}: score, {told}; {mine.shown()}"
            pictures.append((title, figures.curves(lines, "score", log=False, over="frames")))
        for run in [run for run in mine if "programs" in run["final"]][:1]:
            title = f"{NAMES[run['config']['model']]}, {_about(run)}, seed {run['config']['seed']}"
            told = f"{title}: the programs of its policy, one step in {EVERY} of an episode"
            pictures.append((told, figures.over_time(run["final"]["programs"], LIVES)))
    return pictures


def tabulate(runs: Runs) -> list[Table]:
    """Scores beside those of a random agent and of a human tester."""
    tables = []
    for mine, chance in _comparable(runs):
        about = ABOUT[mine[0]["config"]["game"]]
        header = ["agent", "parameters", "score", "in training", "of a human's, above chance, %"]
        rows = []
        for model in MODELS:
            ran = chance if model == "random" else mine.where(model=model)
            if ran:
                scores, random = ran.values("score"), model == "random"
                size = "-" if random else f"{ran[0]['final']['parameters']:,}"
                share = [100 * (score - about.random) / (about.human - about.random) for score in scores]
                learning = "-" if random else spread(ran.values("train_score"), 4)
                rows.append([NAMES[model], size, spread(scores, 4), learning, spread(share, 3)])
        published = f"random {about.random:,g}, human {about.human:,g}"
        tables.append((f"{_about(mine[0])}: scores (Wang et al. 2016: {published})", header, rows))
    return tables


EXPERIMENT = Experiment(
    name="atari",
    config=Atari,
    metrics=("steps", "parameters", "score", "score_error", "train_score", "environment_steps", "frames"),
    axes={"game": GAMES, "model": MODELS, "trainer": TRAINERS},
    fill=fill,
    start=start,
    figures=draw,
    tables=tabulate,
    main={"game": LEARNED, "trainer": ("sync",)},
)
