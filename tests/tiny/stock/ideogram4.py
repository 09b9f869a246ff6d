"""Ideogram 4: texts of other lengths padded on the left, a timestep per sample and per token, no text at all."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_ideogram4 import Ideogram4Transformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 6


def build() -> Ideogram4Transformer2DModel:
    return Ideogram4Transformer2DModel(
        in_channels=8,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=32,
        adaln_dim=16,
        llm_features_dim=12,
        rope_theta=10_000,
        mrope_section=(4, 2, 2),
    )


def inputs(batch: int) -> dict:
    grid = torch.cartesian_prod(torch.tensor([0]), torch.arange(3), torch.arange(5)) + 65536
    position, segment, indicator = torch.zeros(2, TEXT + 15, 3).long(), torch.full((2, TEXT + 15), -1), [[0], [0]]
    for sample, words in enumerate((3, 6)):
        start = TEXT - words
        position[sample, start:TEXT] = torch.arange(words)[:, None]
        position[sample, TEXT:] = grid
        segment[sample, start:] = 1
        indicator[sample] = [0] * start + [3] * words + [2] * 15
    return {
        "hidden_states": random(1, batch, TEXT + 15, 8),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "encoder_hidden_states": random(2, batch, TEXT + 15, 12),
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


BLOCKS = (Blocks(name="layers"),)
CASES = [
    Case(name="ideogram4", build=build, inputs=inputs, blocks=BLOCKS, tokens=15, refused=packed),
    Case(name="ideogram4-timed", build=build, inputs=timed, blocks=BLOCKS, tokens=15),
    Case(name="ideogram4-textless", build=build, inputs=textless, blocks=BLOCKS, tokens=15),
]
