"""Folders of pictures and clips, each with its caption in a file beside it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHAPES = {
    "a red circle": ("ellipse", "red"),
    "two dogs": ("rectangle", "brown"),
    "a photo of a very blue square on white paper": ("rectangle", "blue"),
    "green": ("ellipse", "green"),
    "an orange ball that rolls": ("ellipse", "orange"),
    "a picture of a black box, seen from above": ("rectangle", "black"),
}
"""By caption: captions of several lengths, and what to draw."""


def write_noise(folder: Path, shapes: Sequence[tuple[int, int]] = ((64, 64),) * 4 + ((48, 96),) * 2) -> Path:
    """Random pixels of each shape (rows, columns): `0.png` is "picture 0"."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number, shape in enumerate(shapes):
        Image.fromarray(rng.integers(0, 256, (*shape, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    return folder


def write_gradients(folder: Path, *, masked: bool) -> Path:
    """Two gradients of 64 x 64, with masks of the left third of the first and a corner of the second."""
    folder.mkdir()
    for i, box in enumerate([(0, 0, 20, 63), (40, 40, 63, 63)]):
        Image.linear_gradient("L").rotate(90 * i).resize((64, 64)).convert("RGB").save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"picture {i}")
        if masked:
            mask = Image.new("L", (64, 64))
            ImageDraw.Draw(mask).rectangle(box, fill=128 + 64 * i)
            mask.save(folder / f"{i}_mask.png")
    return folder


def write_shapes(folder: Path) -> Path:
    """Six shapes on transparent ground, 128 x 128: `0.png`, `1.png`, ..."""
    folder.mkdir()
    for number, caption in enumerate(SHAPES):
        draw(caption, at=10 * number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(caption)
    return folder


def write_clips(folder: Path) -> Path:
    """Two shapes that move from left to right in 16 frames of 64 x 64, as GIF."""
    folder.mkdir()
    for number, caption in enumerate(list(SHAPES)[:2]):
        first, *rest = (draw(caption, at=4 * frame).convert("RGB").resize((64, 64)) for frame in range(16))
        first.save(folder / f"{number}.gif", save_all=True, append_images=rest, duration=60)
        (folder / f"{number}.txt").write_text(caption)
    return folder


def draw(caption: str, *, at: int) -> Image.Image:
    """The shape of a caption on transparent ground, `at` pixels from the left."""
    shape, colour = SHAPES[caption]
    image = Image.new("RGBA", (128, 128))
    getattr(ImageDraw.Draw(image), shape)((at, 20, at + 60, 100), fill=colour)
    return image
