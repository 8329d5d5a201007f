"""Games of the Arcade Learning Environment, many at once, and what others score in them.

A *frame* is one of the emulator. An agent sees and acts once in four: a *step* is four frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from neurocoder_lab.errors import LabError

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

Game = Literal["seaquest", "mspacman", "frostbite", "montezuma"]
GAMES: tuple[Game, ...] = Game.__args__
SKIP = 4  # frames a step, the action repeated
STACK = 4  # frames seen at a step: the last of each of the last four steps
LONGEST = 108_000  # frames of an episode: half an hour of play, where most publications end one


@dataclass(frozen=True)
class About:
    """A game: the emulator's name of it, its actions, and scores of a random agent and of a human tester.

    The scores are those of Wang et al. 2016 (Dueling Network Architectures, Table 2: up to 30 idle steps first).
    """

    rom: str
    title: str
    actions: int
    random: float
    human: float


ABOUT: dict[Game, About] = {
    "seaquest": About("seaquest", "Seaquest", 18, 68.4, 42054.7),
    "mspacman": About("ms_pacman", "Ms. Pac-Man", 9, 307.3, 6951.6),
    "frostbite": About("frostbite", "Frostbite", 18, 65.2, 4334.7),
    "montezuma": About("montezuma_revenge", "Montezuma's Revenge", 18, 0.0, 4753.3),
}


def make(
    game: Game, sticky: float, count: int, *, longest: int = LONGEST, threads: int = 1, colour: bool = False
) -> VectorEnv:
    """So many environments of a game, to be stepped together; one that ends begins anew in the same step.

    They give true rewards: what is clipped, and what a lost life means, is the learner's. The emulator
    skips no frame; of the four of a step the last two are joined (Mnih et al. 2015: sprites flicker). An episode begins
    with up to 30 idle frames.

    Args:
        sticky: probability that the emulator repeats the last action instead (Machado et al. 2018: 0.25).
        longest: frames after which an episode is cut.
        threads: of the emulators.
        colour: the whole screen, (1, 210, 160, 3), for eyes; else four gray pictures, (4, 84, 84), for the agent. The
            same seed and actions give the same episode.
    """
    try:
        from ale_py import ALEInterface, LoggerMode
        from ale_py.vector_env import AtariVectorEnv
        from gymnasium.vector import AutoresetMode
    except ImportError as error:
        raise LabError(f"games need gymnasium and ale-py ({error}): pip install 'neurocoder[lab,atari]'") from None
    ALEInterface.setLoggerMode(LoggerMode.Error)  # else it greets
    looks: dict[str, Any] = {"img_height": 84, "img_width": 84, "stack_num": STACK}
    if colour:
        looks = {"img_height": 210, "img_width": 160, "stack_num": 1, "grayscale": False}
    return AtariVectorEnv(
        ABOUT[game].rom,
        count,
        num_threads=threads,
        max_num_frames_per_episode=longest,
        repeat_action_probability=sticky,
        autoreset_mode=AutoresetMode.SAME_STEP,  # the default inserts a step that is none
        frameskip=SKIP,
        maxpool=True,
        noop_max=30,
        episodic_life=False,
        reward_clipping=False,
        use_fire_reset=False,  # none of these games waits for it
        **looks,
    )
