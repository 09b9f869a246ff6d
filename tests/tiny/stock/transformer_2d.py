"""Transformer2DModel in its three forms, and DreamLite's."""

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_2d_dreamlite import DreamLiteTransformer2DModel

from tests.tiny.case import Blocks, Case, random

BLOCKS = (Blocks(name="transformer_blocks"),)
TEXT = 5


def model(**options: Any) -> Transformer2DModel:
    return Transformer2DModel(num_attention_heads=2, attention_head_dim=8, num_layers=3, **options)


def pixels() -> Transformer2DModel:
    """As in a U-Net."""
    return model(in_channels=8, norm_num_groups=4, cross_attention_dim=12)


def patched() -> Transformer2DModel:
    """As PixArt's first checkpoints."""
    return model(
        in_channels=8,
        cross_attention_dim=16,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=12,
    )


def vectors() -> Transformer2DModel:
    """As VQ-Diffusion, which has one timestep for the whole batch."""
    return model(
        cross_attention_dim=12,
        sample_size=4,
        num_vector_embeds=10,
        num_embeds_ada_norm=10,
        norm_type="ada_norm",
    )


dreamlite = partial(
    DreamLiteTransformer2DModel,
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=8,
    num_layers=3,
    norm_num_groups=4,
    cross_attention_dim=12,
    qk_norm="rms_norm",
    ff_mult=2,
)


def text(batch: int) -> dict:
    mask = torch.ones(2, TEXT)
    mask[1, 3:] = 0
    return {"encoder_hidden_states": random(2, batch, TEXT, 12), "encoder_attention_mask": mask[:batch]}


def pixel_inputs(batch: int) -> dict:
    return {"hidden_states": random(1, batch, 8, 4, 6)} | text(batch)


def masked(batch: int) -> dict:
    mask = torch.ones(2, 24)
    mask[0, -5:] = 0
    return pixel_inputs(batch) | {"attention_mask": mask[:batch]}


def patched_inputs(batch: int) -> dict:
    more = {"timestep": torch.tensor([2, 8])[:batch], "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    return {"hidden_states": random(1, batch, 8, 8, 12)} | text(batch) | more


def vector_inputs(batch: int) -> dict:
    vectors = random(1, batch, 16).argsort(dim=1) % 10
    return {
        "hidden_states": vectors,
        "timestep": torch.tensor(2),
        "encoder_hidden_states": random(2, batch, TEXT, 12),
    }


CASES = [
    Case(name="transformer-2d", build=pixels, inputs=masked, blocks=BLOCKS, tokens=24),
    Case(name="transformer-2d-patches", build=patched, inputs=patched_inputs, blocks=BLOCKS, tokens=24),
    Case(name="transformer-2d-vectors", build=vectors, inputs=vector_inputs, blocks=BLOCKS, tokens=16),
    Case(name="dreamlite", build=dreamlite, inputs=masked, blocks=BLOCKS, tokens=24),
    Case(
        name="dreamlite-no-self-attention",
        build=partial(dreamlite, use_self_attention=False),
        inputs=pixel_inputs,
        blocks=BLOCKS,
        tokens=24,
    ),
]
