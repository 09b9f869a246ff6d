"""GLM-Image: text to image, and with condition images in a key-value cache."""

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache, GlmImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

TEXT, CACHED = 5, 7
SIZES = {"text_embed_dim": 16, "condition_dim": 8, "prior_vq_quantizer_codebook_size": 16}
build = tiny(GlmImageTransformer2DModel, **SIZES)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 6, 10), (TEXT, 16), (200, 800)) | {
        "prior_token_id": torch.arange(30).view(2, 15)[:batch] % 16,
        "prior_token_drop": torch.zeros(batch, 15, dtype=torch.bool),
        "target_size": torch.tensor([[48.0, 80.0]]).expand(batch, -1),
        "crop_coords": torch.zeros(batch, 2),
    }


def masked(batch: int) -> dict:
    return inputs(batch) | {"attention_mask": valid(batch, TEXT, 5, 3).long()}


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


blocks = partial(Blocks, name="transformer_blocks", returns=0)
case = partial(Case, build=build, blocks=(blocks(),), tokens=15)
CASES = [
    case(name="glm-image", inputs=inputs, refused=written),
    case(name="glm-image-masked", inputs=masked),
    case(name="glm-image-cached", inputs=cached, blocks=(blocks(cached=CACHED),)),
]
