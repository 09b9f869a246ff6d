"""MiniMax Music 3: the timestep's token before the audio tokens."""

import torch
from diffusers.models.transformers.transformer_minimax_music3 import MiniMaxMusic3Transformer1DModel

from tests.tiny.case import Blocks, Case, random


def build() -> MiniMaxMusic3Transformer1DModel:
    return MiniMaxMusic3Transformer1DModel(
        in_channels=4,
        condition_dim=6,
        num_layers=3,
        num_attention_heads=2,
        attention_head_dim=16,
        ff_inner_dim=32,
        rotary_dim=8,
        fourier_embedding_dim=8,
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 18),
        "timestep": torch.tensor([0.2, 0.8])[:batch],
        "encoder_hidden_states": random(2, batch, 18, 6),
    }


CASES = [
    Case(name="minimax-music3", build=build, inputs=inputs, blocks=(Blocks(name="transformer_blocks"),), tokens=18)
]
