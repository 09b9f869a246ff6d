"""FLUX.1 and Kontext."""

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )


def grid(rows: int, columns: int, image: int = 0) -> torch.Tensor:
    """FLUX's image ids: which image, row, column."""
    ids = torch.zeros(rows, columns, 3)
    ids[..., 0] = image
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)
    return ids.view(-1, 3)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 16, 8),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "pooled_projections": random(3, batch, 16),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "guidance": torch.full((batch,), 3.5),
        "img_ids": grid(4, 4),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def kontext(batch: int) -> dict:
    more = {"hidden_states": random(4, batch, 24, 8), "img_ids": torch.cat([grid(4, 4), grid(2, 4, image=1)])}
    return inputs(batch) | more


def controlled(batch: int) -> dict:
    return inputs(batch) | {
        "controlnet_block_samples": [random(5, batch, 16, 32), random(6, batch, 16, 32)],
        "controlnet_single_block_samples": [random(7 + i, batch, 16, 32) for i in range(3)],
    }


BLOCKS = (
    Blocks(name="transformer_blocks", returns=1),
    Blocks(name="single_transformer_blocks", returns=1),
)
CASES = [
    Case(name="flux", build=build, inputs=inputs, blocks=BLOCKS, tokens=16),
    Case(name="flux-kontext", build=build, inputs=kontext, blocks=BLOCKS, tokens=24, references=8),
    Case(name="flux-controlnet", build=build, inputs=controlled, blocks=BLOCKS, tokens=16),
]
