"""Allegro, with and without a mask over the video."""

from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro
from diffusers.models.transformers.transformer_allegro import AllegroTransformer3DModel

from tests.tiny.case import Blocks, Case, random

BLOCKS = (Blocks(name="transformer_blocks"),)


def build() -> AllegroTransformer3DModel:
    return AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        cross_attention_dim=24,
        sample_height=8,
        sample_width=8,
        sample_frames=3,
        caption_channels=10,
    )


def rope() -> tuple:
    """Tables for time, height and width, and each token's place in them, as the pipeline makes them."""
    tables: Any = get_3d_rotary_pos_embed_allegro(
        embed_dim=12, crops_coords=((0, 0), (2, 4)), grid_size=(2, 4), temporal_size=3, interpolation_scale=(1, 1, 1)
    )
    place = torch.cartesian_prod(*(axis.long() for axis in tables[3:])).T.reshape(3, 1, -1)
    return tables[:3], tuple(place)


def inputs(batch: int) -> dict:
    mask = torch.ones(2, 5)
    mask[1, 3:] = 0
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 8),
        "encoder_hidden_states": random(2, batch, 5, 10),
        "timestep": torch.tensor([200, 800])[:batch],
        "encoder_attention_mask": mask[:batch],
        "image_rotary_emb": rope(),
    }


def masked(batch: int) -> dict:
    mask = torch.ones(2, 3, 4, 8)
    mask[0, 2, 2:] = 0
    return inputs(batch) | {"attention_mask": mask[:batch]}


CASES = [
    Case(name="allegro", build=build, inputs=inputs, blocks=BLOCKS, tokens=24),
    Case(name="allegro-masked", build=build, inputs=masked, blocks=BLOCKS, tokens=24),
]
