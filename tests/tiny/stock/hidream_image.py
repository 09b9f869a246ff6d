"""HiDream: a square grid, one that is not (padded), and patches with a mask."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_hidream_image import HiDreamImageTransformer2DModel

from tests.tiny.case import Blocks, Case, grid, random, tiny

SIZES = {"patch_size": 2, "out_channels": 4, "num_layers": 2, "max_resolution": (8, 10)}
TEXTS = {"caption_channels": [12, 16], "text_emb_dim": 16, "llama_layers": [0, 1, 2, 2]}
build = tiny(HiDreamImageTransformer2DModel, **SIZES, **TEXTS, num_routed_experts=2, num_activated_experts=1)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 8, 8),
        "timesteps": torch.tensor([200, 800])[:batch],
        "encoder_hidden_states_t5": random(2, batch, 3, 12),
        "encoder_hidden_states_llama3": [random(3 + i, batch, 4, 16) for i in range(3)],
        "pooled_embeds": random(6, batch, 16),
    }


def wide(batch: int) -> dict:
    """15 patches, padded to 20 by the model."""
    return inputs(batch) | {"hidden_states": random(7, batch, 4, 6, 10)}


def patched(batch: int) -> dict:
    """3 x 5 patches in 18 places."""
    ids, masks = torch.zeros(18, 3), torch.zeros(18)
    ids[:15] = grid(3, 5).float()
    masks[:15] = 1
    return inputs(batch) | {
        "hidden_states": random(8, batch, 18, 16),
        "img_ids": ids.expand(batch, -1, -1),
        "img_sizes": [(3, 5)] * batch,
        "hidden_states_masks": masks.expand(batch, -1),
    }


DOUBLE = Blocks(name="double_stream_blocks", returns=0, image="first", keys="first")
SINGLE = Blocks(name="single_stream_blocks", image="first", keys="first")
case = partial(Case, build=build, blocks=(DOUBLE, SINGLE), tokens=16)
CASES = [
    case(name="hidream-image", inputs=inputs),
    case(name="hidream-image-wide", inputs=wide, tokens=15),
    case(name="hidream-image-patched", inputs=patched, tokens=18),
]
