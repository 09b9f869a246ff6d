"""EasyAnimate: layers with their own text weights, then layers without; inpainting and control latents; two texts."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_easyanimate import EasyAnimateTransformer3DModel

from tests.tiny.case import Blocks, Case, random


def build(**more: Any) -> EasyAnimateTransformer3DModel:
    config: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": 2,
        "num_layers": 3,
        "mmdit_layers": 2,
        "time_embed_dim": 8,
        "text_embed_dim": 12,
    }
    return EasyAnimateTransformer3DModel(**config | more)


def inpainting() -> EasyAnimateTransformer3DModel:
    more = {"add_norm_text_encoder": True, "text_embed_dim_t5": 12, "after_norm": True}
    return build(in_channels=11, **more)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),
        "timestep": torch.tensor([200.0, 800.0])[:batch],
        "encoder_hidden_states": random(2, batch, 5, 12),
    }


def inpainting_inputs(batch: int) -> dict:
    return inputs(batch) | {
        "encoder_hidden_states_t5": random(3, batch, 4, 12),
        "inpaint_latents": random(4, batch, 5, 3, 4, 6),
        "control_latents": random(5, batch, 2, 3, 4, 6),
    }


BLOCKS = (Blocks(name="transformer_blocks", returns=0),)
CASES = [
    Case(name="easyanimate", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="easyanimate-inpainting", build=inpainting, inputs=inpainting_inputs, blocks=BLOCKS, tokens=18),
]
