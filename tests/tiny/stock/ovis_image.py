"""Ovis-Image: with and without an attention mask."""

import torch
from diffusers.models.transformers.transformer_ovis_image import OvisImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build() -> OvisImageTransformer2DModel:
    return OvisImageTransformer2DModel(
        in_channels=8,
        out_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 15, 8),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "img_ids": torch.cartesian_prod(torch.tensor([0]), torch.arange(3), torch.arange(5)),
        "txt_ids": torch.arange(TEXT)[:, None].expand(-1, 3),
    }


def masked(batch: int) -> dict:
    """Any mask over queries and keys in which each token sees itself."""
    mask = (random(3, batch, 1, TEXT + 15, TEXT + 15) > -1) | torch.eye(TEXT + 15, dtype=torch.bool)
    return inputs(batch) | {"joint_attention_kwargs": {"attention_mask": mask}}


BLOCKS = (
    Blocks(name="transformer_blocks", returns=1),
    Blocks(name="single_transformer_blocks", returns=1),
)
CASES = [
    Case(name="ovis-image", build=build, inputs=inputs, blocks=BLOCKS, tokens=15),
    Case(name="ovis-image-masked", build=build, inputs=masked, blocks=BLOCKS, tokens=15),
]
