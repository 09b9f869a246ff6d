"""CogView3-Plus."""

import torch
from diffusers.models.transformers.transformer_cogview3plus import CogView3PlusTransformer2DModel

from tests.tiny.case import Blocks, Case, random


def build() -> CogView3PlusTransformer2DModel:
    return CogView3PlusTransformer2DModel(
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        out_channels=4,
        text_embed_dim=10,
        time_embed_dim=12,
        condition_dim=2,
        pos_embed_max_size=8,
        sample_size=8,
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 8, 12),
        "encoder_hidden_states": random(2, batch, 5, 10),
        "timestep": torch.tensor([200, 800])[:batch],
        "original_size": torch.tensor([[64.0, 96.0], [512.0, 768.0]])[:batch],
        "target_size": torch.tensor([[64.0, 96.0], [64.0, 96.0]])[:batch],
        "crop_coords": torch.tensor([[0.0, 0.0], [8.0, 4.0]])[:batch],
    }


CASES = [
    Case(
        name="cogview3", build=build, inputs=inputs, blocks=(Blocks(name="transformer_blocks", returns=0),), tokens=24
    ),
]
