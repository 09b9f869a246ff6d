"""Krea 2: with and without a text mask."""

import torch
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build() -> Krea2Transformer2DModel:
    return Krea2Transformer2DModel(
        in_channels=8,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )


def inputs(batch: int) -> dict:
    image = torch.cartesian_prod(torch.tensor([0]), torch.arange(3), torch.arange(5))
    return {
        "hidden_states": random(1, batch, 15, 8),
        "encoder_hidden_states": random(2, batch, TEXT, 3, 16),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "position_ids": torch.cat([torch.zeros(TEXT, 3), image]),
    }


def masked(batch: int) -> dict:
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    return inputs(batch) | {"encoder_attention_mask": mask[:batch]}


BLOCKS = (Blocks(name="transformer_blocks"),)
CASES = [
    Case(name="krea2", build=build, inputs=inputs, blocks=BLOCKS, tokens=15),
    Case(name="krea2-masked", build=build, inputs=masked, blocks=BLOCKS, tokens=15),
]
