"""Pictures of digits for the examples, made here: fonts that matplotlib ships, moved, turned and resized, with noise.

`python examples/digits.py` shows some of them. Test pictures are in fonts that no training picture has. The examples
need the laboratory's packages, of which these pictures take matplotlib and pillow: `pip install '.[lab]'`.
"""

import argparse
from functools import cache
from math import pi
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn import functional as F

SIDE = 16
TRAIN = ("DejaVuSans", "DejaVuSans-Oblique", "DejaVuSansMono-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "STIXGeneral",
         "STIXGeneralBolIta", "cmr10", "cmss10", "cmti10")  # fmt: skip
TEST = ("DejaVuSans-Bold", "DejaVuSansMono", "DejaVuSerif-Italic", "STIXGeneralItalic", "cmb10", "cmtt10")


@cache
def _glyphs(fonts: tuple[str, ...]) -> Tensor:
    """Every digit in every font, (fonts, 10, 2 * SIDE, 2 * SIDE), ink 1 on paper 0."""
    drawn = []
    for name in fonts:
        font = ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf"), 2 * SIDE - 6)
        for digit in range(10):
            picture = Image.new("L", (2 * SIDE, 2 * SIDE))
            ImageDraw.Draw(picture).text((SIDE, SIDE), str(digit), font=font, fill=255, anchor="mm")
            drawn.append(torch.tensor(list(picture.tobytes())).view(2 * SIDE, 2 * SIDE) / 255)
    return torch.stack(drawn).view(len(fonts), 10, 2 * SIDE, 2 * SIDE)


def digits(count: int, seed: int, fonts: tuple[str, ...] = TRAIN, turn: float = 0.0) -> tuple[Tensor, Tensor]:
    """Pictures (count, SIDE * SIDE) and labels (count,). `turn`: by how many degrees all are turned."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(10, (count,), generator=generator)
    glyph = _glyphs(fonts)[torch.randint(len(fonts), (count,), generator=generator), label]
    jitter = torch.randn(count, 4, generator=generator)  # angle, size, and place
    angle, size = (turn + 8 * jitter[:, 0]) * pi / 180, 0.75 + 0.08 * jitter[:, 1]
    cos, sin, place = size * angle.cos(), size * angle.sin(), 0.08 * jitter[:, 2:]
    view = torch.stack([cos, -sin, place[:, 0], sin, cos, place[:, 1]], 1).view(-1, 2, 3)
    grid = F.affine_grid(view, [count, 1, SIDE, SIDE], align_corners=False)
    picture = F.grid_sample(glyph[:, None], grid, align_corners=False).flatten(1)
    return picture + 0.15 * torch.randn(picture.shape, generator=generator), label


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, rate: float = 1e-3, extra=lambda: 0.0) -> None:
    """Adam on batches of 100; `extra` is a loss that is added."""
    model.train()
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    for _ in range(steps):
        rows = torch.randint(len(y), (100,))
        optimiser.zero_grad()
        (F.cross_entropy(model(x[rows]), y[rows]) + extra()).backward()
        optimiser.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In percent."""
    return 100 * (model.eval()(x).argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="digits.png", help="where to save the picture (default: %(default)s)")
    out = parser.parse_args().out
    figure = Figure(figsize=(6, 2.4), layout="constrained")
    for axes, name, fonts in zip(figure.subplots(1, 2), ("training", "test"), (TRAIN, TEST), strict=True):
        rows = digits(40, 0, fonts)[0].view(5, 8, SIDE, SIDE).transpose(1, 2).reshape(5 * SIDE, 8 * SIDE)
        axes.imshow(rows, cmap="gray_r")
        axes.set(title=name, xticks=[], yticks=[])
    figure.savefig(out, dpi=150)
