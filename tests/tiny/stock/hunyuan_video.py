"""HunyuanVideo."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoTransformer3DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build(**more: Any) -> HunyuanVideoTransformer3DModel:
    config: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "patch_size": 2,
        "patch_size_t": 1,
        "text_embed_dim": 12,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (4, 6, 6),
    }
    return HunyuanVideoTransformer3DModel(**config | more)


def token_replace() -> HunyuanVideoTransformer3DModel:
    return build(image_condition_type="token_replace")


def latent_concat() -> HunyuanVideoTransformer3DModel:
    return build(in_channels=9, image_condition_type="latent_concat", guidance_embeds=False)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),
        "timestep": torch.tensor([200, 800])[:batch],
        "encoder_hidden_states": random(2, batch, TEXT, 12),
        "encoder_attention_mask": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])[:batch],
        "pooled_projections": random(3, batch, 8),
        "guidance": torch.full((batch,), 6000.0),
    }


def concat_inputs(batch: int) -> dict:
    return inputs(batch) | {"hidden_states": random(1, batch, 9, 3, 4, 6), "guidance": None}


BLOCKS = (
    Blocks(name="transformer_blocks", returns=0, image="first", keys="first"),
    Blocks(name="single_transformer_blocks", returns=0, image="first", keys="first"),
)
CASES = [
    Case(name="hunyuanvideo", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="hunyuanvideo-token-replace", build=token_replace, inputs=inputs, blocks=BLOCKS, tokens=18, pinned=6),
    Case(name="hunyuanvideo-latent-concat", build=latent_concat, inputs=concat_inputs, blocks=BLOCKS, tokens=18),
]
