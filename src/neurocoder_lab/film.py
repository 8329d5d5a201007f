"""An episode of a finished run of `atari` as a GIF, beside it the programs that policy and value use.

    python -m neurocoder_lab.film runs/atari/seaquest.neurocoder.sync.desk/seed-0 seaquest.gif

The episode is the first of those that the run was measured by.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

import neurocoder as nc
from neurocoder_lab.actor_critic import games
from neurocoder_lab.actor_critic.agent import MEASURED
from neurocoder_lab.actor_critic.games import ABOUT, SKIP
from neurocoder_lab.actor_critic.inside import LAYERS, Moment, composed, watch
from neurocoder_lab.errors import LabError, guarded
from neurocoder_lab.experiments.atari import NAMES, TESTED, Atari, start
from neurocoder_lab.store import make_folder, read_json, replacing

LENGTH, EVERY, SPAN = 400, 2, 100  # steps of the episode, one picture for so many, steps in view
SECONDS = EVERY * SKIP / 60  # a picture, at the speed of the game


def film(run: Path, out: Path, length: int = LENGTH) -> Path:
    """Play the run's agent and write what is seen."""
    if out.suffix != ".gif":
        raise LabError(f"a film is a GIF, such as game.gif; got {out}")
    if not (run / "result.json").is_file() or read_json(run / "config.json")["experiment"] != "atari":
        raise LabError(f"{run} is no folder of a finished run of atari, such as runs/atari/<name>/seed-0")
    if not (run / "model.safetensors").is_file():
        raise LabError(f"{run} has no model.safetensors, which a cluster's node keeps: run it here, or bring the file")
    config = Atari(**read_json(run / "config.json")["config"])
    agent = start(config)
    if not composed(agent.model):
        raise LabError(f"{NAMES[config.model]} has no programs to show: film a run of --model neurocoder")
    model = nc.load(agent.model, run / "model.safetensors").eval()
    longest = TESTED[config.budget]
    eyes, screen = (games.make(config.game, config.sticky, 1, longest=longest, colour=c) for c in (False, True))
    picture, _ = screen.reset(seed=MEASURED)
    pictures, moments, camera = [], [], _Camera(ABOUT[config.game].title)
    for step, moment in zip(range(length), watch(model, agent.measured(eyes)), strict=False):
        moments.append(moment)
        if step % EVERY == 0:
            pictures.append(camera.shoot(picture[0, 0], moments[-SPAN:], step))
        picture = screen.step(moment.action.numpy())[0]
    make_folder(out.parent)
    with replacing(out) as temporary:
        pictures[0].save(
            temporary, "GIF", save_all=True, append_images=pictures[1:], duration=round(1000 * SECONDS), loop=0
        )
    return out


class _Camera:
    """Draws one picture after the other: the screen, and the programs of the last steps."""

    def __init__(self, title: str):
        self.title, self.figure = title, Figure(figsize=(7.2, 3.6), dpi=80, layout="constrained")
        self.canvas = FigureCanvasAgg(self.figure)
        axes = self.figure.subplot_mosaic([["screen", "policy"], ["screen", "value"]], width_ratios=(3, 4))
        self.screen = axes["screen"].imshow(np.zeros((210, 160, 3), np.uint8), aspect=0.82)
        axes["screen"].set_axis_off()
        self.told = axes["screen"].set_title("", fontsize=10)
        look = {"cmap": "viridis", "vmin": 0, "aspect": "auto", "interpolation": "nearest", "origin": "upper"}
        self.maps = {name: axes[name].imshow(np.zeros((2, SPAN)), **look) for name in LAYERS}
        for name in LAYERS:
            axes[name].set_ylabel(f"program of the {name}", fontsize=8)
            axes[name].set_xticks([])
            axes[name].tick_params(labelsize=8)
        axes["value"].set_xlabel(f"the last {SPAN} steps, now at the right", fontsize=8)

    def shoot(self, screen: np.ndarray, moments: list[Moment], step: int) -> Image.Image:
        self.screen.set_data(screen)
        self.told.set_text(f"{self.title}, step {step}, score {moments[-1].score:,.0f}")
        for name, image in self.maps.items():
            use_PT = np.stack([moment.use[name].cpu().numpy() for moment in moments], 1)
            image.set_data(np.pad(use_PT, ((0, 0), (SPAN - use_PT.shape[1], 0))))
            image.set_extent((0.5, SPAN + 0.5, len(use_PT) + 0.5, 0.5))
            image.set_clim(0, use_PT.max())
        self.canvas.draw()
        return Image.fromarray(np.asarray(self.canvas.buffer_rgba())[..., :3]).quantize(128, dither=Image.Dither.NONE)


def main(words: list[str]) -> int:
    if len(words) != 2:
        raise LabError("usage: python -m neurocoder_lab.film RUN_FOLDER FILE.gif")
    print(film(Path(words[0]), Path(words[1])))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
