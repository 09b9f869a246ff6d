"""Images on disk: single PNGs and grids of them."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from tread.sampling.fonts import legible

SMALLEST = 48  # pixels; smaller images, such as 8 x 8 digits, are enlarged by an integer factor
GAP = 4  # pixels between images
LETTERS = 12  # pixels, the size of names


def to_pil(image: Tensor) -> Image.Image:
    """A uint8 image (H, W, 3 or 1) as a PIL image."""
    array = image.cpu().numpy()
    return Image.fromarray(array.squeeze(-1) if array.shape[-1] == 1 else array)


def make_grid(images: Tensor, columns: int, rows: Sequence[str] = ()) -> Image.Image:
    """A grid of uint8 images (N, H, W, 3 or 1) on white, row by row; `rows` are names to write left of them."""
    count, height, width, channels = images.shape
    factor = max(1, math.ceil(SMALLEST / max(height, width)))
    large = images.repeat_interleave(factor, 1).repeat_interleave(factor, 2).cpu().numpy()  # (N, fH, fW, C)
    height, width, count = height * factor, width * factor, math.ceil(count / columns)
    canvas = np.full((count * (height + GAP) - GAP, columns * (width + GAP) - GAP, channels), 255, np.uint8)
    for i, image in enumerate(large):
        top, left = i // columns * (height + GAP), i % columns * (width + GAP)
        canvas[top : top + height, left : left + width] = image
    grid = Image.fromarray(canvas.squeeze(-1) if channels == 1 else canvas)
    return _labelled(grid, rows[:count], height + GAP) if rows else grid


def _labelled(grid: Image.Image, names: Sequence[str], row: int) -> Image.Image:
    """A grid with a name left of each row; a row is `row` pixels high."""
    labels = [legible(name, LETTERS) for name in names]
    margin = math.ceil(max(font.getlength(text) for text, font in labels)) + 2 * GAP
    wide = Image.new(grid.mode, (margin + grid.width, grid.height), "white")
    wide.paste(grid, (margin, 0))
    draw = ImageDraw.Draw(wide)
    for i, (text, font) in enumerate(labels):
        draw.text((GAP, i * row + (row - GAP) // 2), text, fill="black", font=font, anchor="lm")
    return wide


def image_names(labels: Sequence[int]) -> list[str]:
    """File names `class-index.png`; the index counts within the class."""
    counts: dict[int, int] = {}
    names = []
    for label in labels:
        counts[label] = counts.get(label, -1) + 1
        names.append(f"{label:04d}-{counts[label]:05d}.png")
    return names


def save_images(images: Tensor, names: Sequence[str], folder: Path) -> None:
    """Write each image under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    for image, name in zip(images, names, strict=True):
        to_pil(image).save(folder / name)
