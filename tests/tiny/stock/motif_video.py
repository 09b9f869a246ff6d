"""Motif-Video: with a decoder that starts a new stream, and without; image conditions; text cross-attention."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_motif_video import MotifVideoTransformer3DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build(**more: Any) -> MotifVideoTransformer3DModel:
    config: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 3,
        "mlp_ratio": 2.0,
        "text_embed_dim": 12,
        "rope_axes_dim": (4, 6, 6),
    }
    return MotifVideoTransformer3DModel(**config | more)


def decoder() -> MotifVideoTransformer3DModel:
    more = {"enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True}
    return build(num_decoder_layers=2, image_embed_dim=8, **more)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),
        "timestep": torch.tensor([200, 800])[:batch],
        "encoder_hidden_states": random(2, batch, TEXT, 12),
    }


def conditioned(batch: int) -> dict:
    return inputs(batch) | {
        "encoder_attention_mask": torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])[:batch],
        "image_embeds": random(3, batch, 4, 8),
    }


BLOCKS = (
    Blocks(name="transformer_blocks", returns=0, image="first", keys="first"),
    Blocks(name="single_transformer_blocks", returns=0, image="first", keys="first"),
)
CASES = [
    Case(name="motif-video", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="motif-video-decoder", build=decoder, inputs=conditioned, blocks=BLOCKS, tokens=18),
]
