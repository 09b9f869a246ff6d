"""Lumina-Image 2.0."""

import torch
from diffusers.models.transformers.transformer_lumina2 import Lumina2Transformer2DModel

from tests.tiny.case import Blocks, Case, random

BLOCKS = (Blocks(name="layers"),)
CAPTIONS = [3, 7]


def build() -> Lumina2Transformer2DModel:
    return Lumina2Transformer2DModel(
        in_channels=4,
        hidden_size=32,
        num_layers=3,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(16, 16, 16),
        cap_feat_dim=10,
    )


def inputs(batch: int) -> dict:
    mask = torch.arange(max(CAPTIONS)) < torch.tensor(CAPTIONS)[:, None]
    return {
        "hidden_states": random(1, batch, 4, 8, 12),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "encoder_hidden_states": random(2, batch, max(CAPTIONS), 10),
        "encoder_attention_mask": mask[:batch],
    }


def alike(batch: int) -> dict:
    """Captions of one length: the model makes no mask."""
    return inputs(batch) | {"encoder_attention_mask": torch.ones(batch, max(CAPTIONS), dtype=torch.bool)}


CASES = [
    Case(
        name="lumina2",
        build=build,
        inputs=inputs,
        blocks=BLOCKS,
        tokens=24,
        offsets=lambda batch: CAPTIONS[:batch],
    ),
    Case(name="lumina2-alike", build=build, inputs=alike, blocks=BLOCKS, tokens=24),
]
