"""Allegro, with and without a mask over the video."""

from functools import partial
from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro
from diffusers.models.transformers.transformer_allegro import AllegroTransformer3DModel

from tests.tiny.case import Blocks, Case, tiny, usual, valid

SIZES = {"attention_head_dim": 12, "sample_height": 8, "sample_width": 8, "sample_frames": 3, "caption_channels": 10}
build = tiny(AllegroTransformer3DModel, **SIZES)


def rope() -> tuple:
    """Tables for time, height and width, and each token's place in them, as the pipeline makes them."""
    tables: Any = get_3d_rotary_pos_embed_allegro(
        embed_dim=12, crops_coords=((0, 0), (2, 4)), grid_size=(2, 4), temporal_size=3, interpolation_scale=(1, 1, 1)
    )
    place = torch.cartesian_prod(*(axis.long() for axis in tables[3:])).T.reshape(3, 1, -1)
    return tables[:3], tuple(place)


def inputs(batch: int) -> dict:
    more = {"encoder_attention_mask": valid(batch, 5, 5, 3).float(), "image_rotary_emb": rope()}
    return usual(batch, (4, 3, 4, 8), (5, 10), (200, 800)) | more


def masked(batch: int) -> dict:
    mask = torch.ones(2, 3, 4, 8)
    mask[0, 2, 2:] = 0
    return inputs(batch) | {"attention_mask": mask[:batch]}


case = partial(Case, build=build, blocks=(Blocks(name="transformer_blocks"),), tokens=24)
CASES = [case(name="allegro", inputs=inputs), case(name="allegro-masked", inputs=masked)]
