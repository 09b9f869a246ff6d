"""Transformer2DModel in its three forms, and DreamLite's."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.transformers.transformer_2d_dreamlite import DreamLiteTransformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny, valid

TEXT = 5
model = tiny(Transformer2DModel, attention_head_dim=8, in_channels=8, cross_attention_dim=12)
# as in a U-Net
pixels = partial(model, norm_num_groups=4)
# as PixArt's first checkpoints
PATCHES = {"sample_size": 8, "patch_size": 2, "cross_attention_dim": 16, "caption_channels": 12}
NORM = {"norm_type": "ada_norm_single", "norm_elementwise_affine": False, "num_embeds_ada_norm": 10}
patched = partial(model, **PATCHES, **NORM)
# as VQ-Diffusion, which has one timestep for the whole batch
VECTORS = {"in_channels": None, "sample_size": 4, "num_vector_embeds": 10}
vectors = partial(model, **VECTORS, num_embeds_ada_norm=10, norm_type="ada_norm")

SIZES = {"attention_head_dim": 8, "in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 12, "ff_mult": 2}
dreamlite = tiny(DreamLiteTransformer2DModel, **SIZES, qk_norm="rms_norm")


def text(batch: int) -> dict:
    mask = valid(batch, TEXT, 5, 3).float()
    return {"encoder_hidden_states": random(2, batch, TEXT, 12), "encoder_attention_mask": mask}


def pixel_inputs(batch: int) -> dict:
    return {"hidden_states": random(1, batch, 8, 4, 6)} | text(batch)


def masked(batch: int) -> dict:
    return pixel_inputs(batch) | {"attention_mask": valid(batch, 24, 19, 24).float()}


def patched_inputs(batch: int) -> dict:
    more = {"timestep": torch.tensor([2, 8])[:batch], "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    return {"hidden_states": random(1, batch, 8, 8, 12)} | text(batch) | more


def vector_inputs(batch: int) -> dict:
    more = {"hidden_states": random(1, batch, 16).argsort(dim=1) % 10, "timestep": torch.tensor(2)}
    return {"encoder_hidden_states": random(2, batch, TEXT, 12)} | more


case = partial(Case, blocks=(Blocks(name="transformer_blocks"),), tokens=24)
no_self_attention = partial(dreamlite, use_self_attention=False)
CASES = [
    case(name="transformer-2d", build=pixels, inputs=masked),
    case(name="transformer-2d-patches", build=patched, inputs=patched_inputs),
    case(name="transformer-2d-vectors", build=vectors, inputs=vector_inputs, tokens=16),
    case(name="dreamlite", build=dreamlite, inputs=masked),
    case(name="dreamlite-no-self-attention", build=no_self_attention, inputs=pixel_inputs),
]
