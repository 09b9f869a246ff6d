"""Stable Diffusion 3 and 3.5, with ControlNet and with skipped layers."""

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

from tests.tiny.case import Blocks, Case, random

# the image tokens come before the text in the joint attention
BLOCKS = (Blocks(name="transformer_blocks", returns=1, keys="first"),)


def build() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=8,
    )


def build_medium() -> SD3Transformer2DModel:
    """3.5: normalised queries and keys; the first layers also attend to the image alone."""
    return SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 8, 12),
        "encoder_hidden_states": random(2, batch, 7, 12),
        "pooled_projections": random(3, batch, 10),
        "timestep": torch.tensor([200.0, 800.0])[:batch],
    }


def controlled(batch: int) -> dict:
    return inputs(batch) | {"block_controlnet_hidden_states": [random(4, batch, 24, 16), random(5, batch, 24, 16)]}


def skipping(batch: int) -> dict:
    return inputs(batch) | {"skip_layers": [1]}


CASES = [
    Case(name="sd3", build=build, inputs=inputs, blocks=BLOCKS, tokens=24),
    Case(name="sd3.5", build=build_medium, inputs=inputs, blocks=BLOCKS, tokens=24),
    Case(name="sd3-controlnet", build=build, inputs=controlled, blocks=BLOCKS, tokens=24),
    Case(name="sd3.5-skip", build=build_medium, inputs=skipping, blocks=BLOCKS, tokens=24),
]
