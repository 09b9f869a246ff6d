"""AnyFlow, bidirectional."""

import torch
from diffusers.models.transformers.transformer_anyflow import AnyFlowTransformer3DModel

from tests.tiny.case import Blocks, Case, random


def build() -> AnyFlowTransformer3DModel:
    return AnyFlowTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=3,
        image_dim=16,
        rope_max_seq_len=16,
    )


def inputs(batch: int) -> dict:
    """Timesteps differ from frame to frame."""
    return {
        "hidden_states": random(1, batch, 3, 4, 4, 6),  # 3 frames of 2 x 3 tokens
        "timestep": torch.tensor([[900.0, 600.0, 300.0], [800.0, 500.0, 100.0]])[:batch],
        "r_timestep": torch.tensor([[400.0, 300.0, 0.0], [700.0, 100.0, 50.0]])[:batch],
        "encoder_hidden_states": random(2, batch, 7, 16),
    }


def image(batch: int) -> dict:
    return inputs(batch) | {"encoder_hidden_states_image": random(3, batch, 5, 16)}


BLOCKS = (Blocks(name="blocks"),)
CASES = [
    Case(name="anyflow", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="anyflow-i2v", build=build, inputs=image, blocks=BLOCKS, tokens=18),
]
