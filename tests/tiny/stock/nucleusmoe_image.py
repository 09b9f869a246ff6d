"""NucleusMoE-Image: with and without a text mask, with experts.

The experts choose tokens, so what a token gets depends on which others are there, and the oracle, which runs at full
length, can only follow where the experts take all of them: the capacity factor is the number of experts.
"""

import torch
from diffusers.models.transformers.transformer_nucleusmoe_image import NucleusMoEImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 6


def build() -> NucleusMoEImageTransformer2DModel:
    return NucleusMoEImageTransformer2DModel(
        in_channels=8,
        out_channels=2,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        mlp_ratio=6.0,
        dense_moe_strategy="leave_first_block_dense",
        num_experts=3,
        moe_intermediate_dim=16,
        capacity_factors=3.0,
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 15, 8),
        "img_shapes": [(1, 3, 5)] * batch,
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
    }


def masked(batch: int) -> dict:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    return inputs(batch) | {"encoder_hidden_states_mask": mask[:batch]}


BLOCKS = (Blocks(name="transformer_blocks", keys="first", image_queries=True),)
CASES = [
    Case(name="nucleusmoe-image", build=build, inputs=inputs, blocks=BLOCKS, tokens=15),
    Case(name="nucleusmoe-image-masked", build=build, inputs=masked, blocks=BLOCKS, tokens=15),
]
