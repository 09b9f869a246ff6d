"""LongCat-Image: text to image, Edit."""

import torch
from diffusers.models.transformers.transformer_longcat_image import LongCatImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build() -> LongCatImageTransformer2DModel:
    return LongCatImageTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=[4, 6, 6],
    )


def grid(rows: int, columns: int, kind: int) -> torch.Tensor:
    """LongCat's image ids: 1 for the target or 2 for the reference, row, column, both after the text's."""
    return torch.cartesian_prod(torch.tensor([kind]), TEXT + torch.arange(rows), TEXT + torch.arange(columns))


def inputs(batch: int) -> dict:
    place = torch.arange(TEXT)
    return {
        "hidden_states": random(1, batch, 15, 8),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "img_ids": grid(3, 5, 1),
        "txt_ids": torch.stack([torch.zeros_like(place), place, place], dim=1),
    }


def edit(batch: int) -> dict:
    more = {"hidden_states": random(3, batch, 21, 8), "img_ids": torch.cat([grid(3, 5, 1), grid(2, 3, 2)])}
    return inputs(batch) | more


BLOCKS = (
    Blocks(name="transformer_blocks", returns=1),
    Blocks(name="single_transformer_blocks", returns=1),
)
CASES = [
    Case(name="longcat-image", build=build, inputs=inputs, blocks=BLOCKS, tokens=15),
    Case(name="longcat-image-edit", build=build, inputs=edit, blocks=BLOCKS, tokens=21, references=6),
]
