"""Which tokens were kept: masks over pictures and a heat map, recomputed from seed and step.

A selection is a hash of (seed, step, micro-step, route, position in the batch, token), so a run stores none of them.
`random` is reproduced exactly as long as no token is forced. `l1` also ranks tokens by activations, which are not
stored: only its random part is shown, with a note.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tread.page.pictures import Picture, encoded, picture_files, spread
from tread.page.read import Run, whole
from tread.routing import noise
from tread.routing.budget import kept_count
from tread.routing.plan import RoutePlan
from tread.routing.selection import select
from tread.sampling.grid import GAP

STEPS, SAMPLES = 8, 6
"""Number of steps with masks, and of samples per step."""
LOOKED_AT = 20_000
"""Most steps of a long run that are searched for routed ones."""
DRAWN = 3_000_000
"""Most random numbers drawn for a heat map."""
CELL = 112
"""Approximate side of a picture under a mask, in pixels."""
COVER, PLAIN = (240, 185, 100), (0, 114, 178)
"""Colours of dropped tokens, and of kept ones where there is no picture."""
RAMP = np.array([(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)], np.float32)
"""Colour map of the heat map from 0 to 1, dark to bright; safe for red-green colour blindness."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The tokens that one route of a run keeps."""

    title: str
    masks: dict[int, Picture]
    """By step, samples of the batch with dropped tokens covered; captions say how many were kept."""
    first: int
    """The step shown first: one at the full ratio."""
    heat: Picture
    notes: list[str]


def kept_tokens(run: Run) -> tuple[list[Kept], str]:
    """The kept tokens of each route of a run; or an empty list and the reason."""
    plan, grid = run.plan, run.grid
    if plan is None:
        routed = any(kept < 1 for _, kept in run.values("tokens_kept"))
        return [], "The run did not record its routes." if routed else "Every step was dense: all tokens were kept."
    if grid is None:
        return [], "The run did not record the grid of its tokens."
    if plan.importance == 1:
        return [], "The selector is l1 with importance 1: the tokens' own size decides, and a run does not store it."
    steps = [step for step in spread(range(run.last_step), LOOKED_AT) if _scale(plan, step) > 0]
    if not steps:
        return [], "No step so far was routed."
    pictures = sample_pictures(run, grid)
    return [_kept(run, plan, index, grid, steps, pictures) for index in range(len(plan.routes))], ""


def layer_shares(run: Run) -> list[float]:
    """The share of tokens that each layer keeps at the full ratio; empty if the plan or the grid is unknown."""
    plan, grid = run.plan, run.grid
    if plan is None or plan.depth is None or grid is None:
        return []
    tokens, shares = math.prod(grid), [1.0] * plan.depth
    for route in plan.routes:
        for layer in route.layers:
            shares[layer] = kept_count(tokens, route.selection_ratio) / tokens
    return shares


def selection(plan: RoutePlan, route: int, step: int, positions: Tensor, tokens: int) -> Tensor:
    """The tokens that the route with this index keeps in optimizer step `step` (from 0), (B, K).

    `positions` (B,) are positions in the global batch; it is the first micro-step, and no token is forced.
    """
    ratio = plan.routes[route].selection_ratio * _scale(plan, step)
    score = noise.bits(plan.seed, step, 0, route, positions.unsqueeze(1), torch.arange(tokens))  # (B, S)
    return select(score, kept_count(tokens, ratio))


def heat_map(plan: RoutePlan, route: int, steps: Sequence[int], tokens: int) -> tuple[Tensor, int]:
    """The frequency with which each token was kept, (S,) in [0, 1], and the number of draws behind it."""
    samples = 16
    chosen = spread(steps, max(4, DRAWN // (tokens * samples)))
    counts = torch.zeros(tokens)
    for step in chosen:
        ids = selection(plan, route, step, torch.arange(samples), tokens)  # (B, K)
        counts += torch.bincount(ids.flatten(), minlength=tokens)
    return counts / (len(chosen) * samples), len(chosen) * samples


def _scale(plan: RoutePlan, step: int) -> float:
    return 1.0 if plan.schedule is None else plan.schedule.scale(step)


def _kept(
    run: Run,
    plan: RoutePlan,
    index: int,
    grid: tuple[int, int, int],
    steps: list[int],
    pictures: list[list[Image.Image]],
) -> Kept:
    tokens, route = math.prod(grid), plan.routes[index]
    masks = {}
    for step in spread(range(run.last_step), STEPS):
        ids = selection(plan, index, step, torch.arange(SAMPLES), tokens)
        kept = torch.zeros(SAMPLES, tokens, dtype=torch.bool).scatter_(1, ids, True).reshape(SAMPLES, *grid).numpy()
        caption = f"step {step + 1}: {ids.shape[1]} of {tokens} tokens kept ({ids.shape[1] / tokens:.0%})"
        masks[step + 1] = encoded(_covered(kept, pictures), caption, lossless=True)
    full = [step for step in steps if _scale(plan, step) == 1] or steps
    share, draws = heat_map(plan, index, full, tokens)
    return Kept(
        title=f"layers {route.start_layer_idx} to {route.end_layer_idx}, {route.selection_ratio:.0%} dropped",
        masks=masks,
        first=min(masks, key=lambda step: (-_scale(plan, step - 1), step)),
        heat=encoded(_heat(share, grid), lossless=True),
        notes=[_spread_note(share, draws), *_caveats(run, plan, full[-1], tokens)],
    )


def _spread_note(share: Tensor, draws: int) -> str:
    mean = float(share.mean())
    wide = 2 * math.sqrt(mean * (1 - mean) / draws)
    return (
        f"In {draws:,} draws, spread over the run's routed steps, a token was kept {mean:.1%} of the time, the rarest "
        f"{float(share.min()):.1%} and the most frequent {float(share.max()):.1%}; a fair draw leaves 95% of them "
        f"between {mean - wide:.1%} and {mean + wide:.1%}."
    )


def _caveats(run: Run, plan: RoutePlan, step: int, tokens: int) -> list[str]:
    """Notes on how the masks shown may differ from those of training."""
    notes = []
    if plan.importance:
        notes.append(
            f"The selector is l1 with importance {plan.importance:g}: the size of the tokens in training takes part in "
            "it, and a run does not store that. Shown is its random part alone."
        )
    layers = [len(route.layers) for route in plan.routes]
    expected = sum(
        layer * kept_count(tokens, route.selection_ratio * _scale(plan, step))
        for layer, route in zip(layers, plan.routes, strict=True)
    ) / (sum(layers) * tokens)
    share = dict(run.values("tokens_kept")).get(step + 1)
    if share is not None and abs(share - expected) > 0.005:
        notes.append(
            f"Step {step + 1} kept {share:.0%} and not the {expected:.0%} shown: its samples had another size, or some "
            "tokens were forced (masks, references, a first frame), and which ones is not stored."
        )
    return notes


def sample_pictures(run: Run, grid: tuple[int, int, int]) -> list[list[Image.Image]]:
    """The run's newest pictures to lay masks over: a list of frames per sample; empty if it has none."""
    files = picture_files(run)
    if not files:
        return []
    try:
        newest = files[max(files)]
        if run.kind == "fine-tuning":
            return [_frames_of(path, grid) for path in newest[:SAMPLES]]
        return [[cell] for cell in grid_cells(newest[0], run)]
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return []


def grid_cells(path: Path, run: Run) -> list[Image.Image]:
    """The first sample of each row of a grid that `tread train` drew, with names left of the rows or without."""
    shape, classes = run.facts.get("shape"), run.facts.get("num_classes")
    sizes: list[Any] = [run.settings.get("sample.per_class"), run.settings.get("sample.classes"), classes]
    sizes += shape if isinstance(shape, list) else []
    if len(sizes) != 6 or not all((whole(size) or 0) > 0 for size in sizes):
        return []
    columns, rows = sizes[0], min(sizes[1:3])
    with Image.open(path) as image:
        image = image.convert("RGB")
    height = (image.height + GAP) // rows - GAP
    width = height * sizes[5] // sizes[4]
    margin = image.width - (columns * (width + GAP) - GAP)
    if margin < 0 or min(height, width) < 1:
        return []
    tops = [row * (height + GAP) for row in range(rows)]
    return [image.crop((margin, top, margin + width, top + height)) for top in tops[:SAMPLES]]


def _frames_of(path: Path, grid: tuple[int, int, int]) -> list[Image.Image]:
    """The frames of a preview: the image itself, or the frames in the strip of a clip."""
    with Image.open(path) as image:
        image = image.convert("RGB")
    if grid[0] == 1:
        return [image]
    count = max(1, round(image.width / (image.height * grid[2] / grid[1])))
    wide = image.width / count
    return [image.crop((round(i * wide), 0, round((i + 1) * wide), image.height)) for i in range(count)]


def _covered(kept: np.ndarray, pictures: list[list[Image.Image]]) -> Image.Image:
    """Samples in a row, frames below each other, with a cover over dropped tokens; kept (B, F, H, W)."""
    _, frames, rows, columns = kept.shape
    scale = max(1, round(CELL / max(rows, columns)))
    height, width = rows * scale, columns * scale
    shown = spread(range(frames), 4)
    count = len(pictures) or len(kept)
    sheet = Image.new("RGBA", (count * (width + GAP) - GAP, len(shown) * (height + GAP) - GAP))
    for sample in range(count):
        for line, frame in enumerate(shown):
            mask = np.kron(kept[sample, frame], np.ones((scale, scale), bool))  # (height, width)
            cell = np.full((height, width, 3), PLAIN)
            if pictures:
                of = pictures[sample]
                picture = of[min(len(of) - 1, round(frame * (len(of) - 1) / max(1, frames - 1)))]
                cell = np.asarray(_fitted(picture, width, height))
            covered = cell * 0.15 + np.array(COVER) * 0.85  # (height, width, 3)
            cell = np.where(mask[..., None], cell, covered)
            sheet.paste(Image.fromarray(cell.astype(np.uint8)), (sample * (width + GAP), line * (height + GAP)))
    return sheet


def _fitted(picture: Image.Image, width: int, height: int) -> Image.Image:
    """The centre crop of a picture, resized to (width, height)."""
    scale = min(picture.width / width, picture.height / height)
    wide, high = scale * width, scale * height
    left, top = (picture.width - wide) / 2, (picture.height - high) / 2
    return picture.resize((width, height), box=(left, top, left + wide, top + high))


def _heat(share: Tensor, grid: tuple[int, int, int]) -> Image.Image:
    """Frames beside each other, each token a square of its colour."""
    values = share.reshape(grid).numpy()[spread(range(grid[0]), 4)]  # (F, H, W)
    scale = max(1, round(CELL * 1.5 / max(grid[1:])))
    position = np.clip(values, 0, 1) * (len(RAMP) - 1)
    low = np.minimum(position.astype(int), len(RAMP) - 2)
    fraction = (position - low)[..., None]
    colours = (RAMP[low] * (1 - fraction) + RAMP[low + 1] * fraction).astype(np.uint8)  # (F, H, W, 3)
    colours = colours.repeat(scale, 1).repeat(scale, 2)
    sheet = Image.new("RGBA", (len(colours) * (colours.shape[2] + GAP) - GAP, colours.shape[1]))
    for index, frame in enumerate(colours):
        sheet.paste(Image.fromarray(frame), (index * (colours.shape[2] + GAP), 0))
    return sheet
