"""Lumina-Next-T2I."""

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina
from diffusers.models.transformers.lumina_nextdit2d import LuminaNextDiT2DModel

from tests.tiny.case import Blocks, Case, random


def build() -> LuminaNextDiT2DModel:
    return LuminaNextDiT2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=3,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        cross_attention_dim=10,
    )


def inputs(batch: int) -> dict:
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    return {
        "hidden_states": random(1, batch, 4, 8, 12),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "encoder_hidden_states": random(2, batch, 5, 10),
        "encoder_mask": mask[:batch],
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(8, 16, 16),
        "cross_attention_kwargs": {},  # the stock class fails on its own default, None
    }


CASES = [Case(name="lumina-next", build=build, inputs=inputs, blocks=(Blocks(name="layers"),), tokens=24)]
