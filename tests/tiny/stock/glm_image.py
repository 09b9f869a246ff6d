"""GLM-Image: text to image, and with condition images in a key-value cache."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache, GlmImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT, CACHED = 5, 7


def build() -> GlmImageTransformer2DModel:
    return GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=16,
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 6, 10),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "prior_token_id": torch.arange(30).view(2, 15)[:batch] % 16,
        "prior_token_drop": torch.zeros(batch, 15, dtype=torch.bool),
        "timestep": torch.tensor([200, 800])[:batch],
        "target_size": torch.tensor([[48.0, 80.0]]).expand(batch, -1),
        "crop_coords": torch.zeros(batch, 2),
    }


def masked(batch: int) -> dict:
    return inputs(batch) | {"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])[:batch]}


def cached(batch: int) -> dict:
    """One set of condition images for all samples."""
    caches = GlmImageKVCache(3)
    for layer in range(3):
        caches[layer].store(random(3 + layer, 1, CACHED, 2, 16), random(6 + layer, 1, CACHED, 2, 16))
    caches.set_mode("read")
    return inputs(batch) | {"kv_caches": caches}


def written(model: Any, batch: int) -> dict:
    caches = GlmImageKVCache(3)
    caches.set_mode("write")
    return inputs(batch) | {"kv_caches": caches}


BLOCKS = (Blocks(name="transformer_blocks", returns=0),)
CACHED_BLOCKS = (Blocks(name="transformer_blocks", returns=0, cached=CACHED),)
CASES = [
    Case(name="glm-image", build=build, inputs=inputs, blocks=BLOCKS, tokens=15, refused=written),
    Case(name="glm-image-masked", build=build, inputs=masked, blocks=BLOCKS, tokens=15),
    Case(name="glm-image-cached", build=build, inputs=cached, blocks=CACHED_BLOCKS, tokens=15),
]
