"""Ideogram 4: texts of other lengths padded on the left, a timestep per sample and per token, no text at all."""

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_ideogram4 import Ideogram4Transformer2DModel

from tests.tiny.case import Blocks, Case, grid, random, tiny, usual

TEXT = 6
SIZES = {"in_channels": 8, "adaln_dim": 16, "llm_features_dim": 12}
build = tiny(Ideogram4Transformer2DModel, **SIZES, rope_theta=10_000, mrope_section=(4, 2, 2))


def inputs(batch: int) -> dict:
    position, segment, indicator = torch.zeros(2, TEXT + 15, 3).long(), torch.full((2, TEXT + 15), -1), [[0], [0]]
    for sample, words in enumerate((3, 6)):
        start = TEXT - words
        position[sample, start:TEXT] = torch.arange(words)[:, None]
        position[sample, TEXT:] = grid(3, 5) + 65536
        segment[sample, start:] = 1
        indicator[sample] = [0] * start + [3] * words + [2] * 15
    return usual(batch, (TEXT + 15, 8), (TEXT + 15, 12)) | {
        "position_ids": position[:batch],
        "segment_ids": segment[:batch],
        "indicator": torch.tensor(indicator)[:batch],
    }


def timed(batch: int) -> dict:
    return inputs(batch) | {"timestep": random(3, batch, TEXT + 15).sigmoid()}


def textless(batch: int) -> dict:
    return {name: v[:, TEXT:] if v.ndim > 1 else v for name, v in inputs(batch).items()}


def packed(model: Any, batch: int) -> dict:
    """Two images in a sample, text between them."""
    arguments = inputs(batch)
    arguments["indicator"][1, 12:15] = 3
    return arguments


case = partial(Case, build=build, blocks=(Blocks(name="layers"),), tokens=15)
CASES = [
    case(name="ideogram4", inputs=inputs, refused=packed),
    case(name="ideogram4-timed", inputs=timed),
    case(name="ideogram4-textless", inputs=textless),
]
