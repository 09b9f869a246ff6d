"""AuraFlow."""

from functools import partial

import torch
from diffusers.models.transformers.auraflow_transformer_2d import AuraFlowTransformer2DModel

from tests.tiny.case import Blocks, Case, random

BLOCKS = (Blocks(name="joint_transformer_blocks", returns=1), Blocks(name="single_transformer_blocks"))


build = partial(
    AuraFlowTransformer2DModel,
    sample_size=8,
    in_channels=4,
    num_mmdit_layers=2,
    num_single_dit_layers=2,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=12,
    caption_projection_dim=16,
    out_channels=4,
    pos_embed_max_size=36,
)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 8, 12),
        "encoder_hidden_states": random(2, batch, 5, 12),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
    }


# the inner window of the second opens where text is joined already
single = partial(build, num_mmdit_layers=1, num_single_dit_layers=3)
CASES = [
    Case(name="auraflow", build=build, inputs=inputs, blocks=BLOCKS, tokens=24),
    Case(name="auraflow-single", build=single, inputs=inputs, blocks=BLOCKS, tokens=24),
]
