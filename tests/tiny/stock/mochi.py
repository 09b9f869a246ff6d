"""Mochi 1. It attends sample by sample, with the valid text tokens only."""

import torch
from diffusers.models.transformers.transformer_mochi import MochiTransformer3DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build() -> MochiTransformer3DModel:
    return MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=16,
        max_sequence_length=TEXT,
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "timestep": torch.tensor([200.0, 800.0])[:batch],
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:batch].bool(),
    }


CASES = [
    Case(
        name="mochi",
        build=build,
        inputs=inputs,
        blocks=(Blocks(name="transformer_blocks", returns=0, image="first", keys="first"),),
        tokens=18,
    ),
]
