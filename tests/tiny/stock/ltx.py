"""LTX-Video, with one timestep per sample and with one per token."""

import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 7


def build() -> LTXVideoTransformer3DModel:
    return LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        num_layers=3,
        caption_channels=16,
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 18, 8),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "timestep": torch.tensor([800.0, 300.0])[:batch],
        "encoder_attention_mask": (torch.arange(TEXT) < torch.tensor([[TEXT], [4]])[:batch]).long(),
        "num_frames": 3,
        "height": 2,
        "width": 3,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def conditioned(batch: int) -> dict:
    """Every token has its own timestep, and its place is given by hand."""
    timestep = inputs(batch)["timestep"][:, None] * torch.linspace(0, 1, 18)
    grid = torch.meshgrid(torch.arange(3), torch.arange(2), torch.arange(3), indexing="ij")
    places = torch.stack(grid).flatten(1).float()  # (3, S)
    shift = torch.tensor([[[0.0], [0.0], [0.0]], [[1.0], [3.0], [5.0]]])[:batch]
    return inputs(batch) | {"timestep": timestep, "video_coords": places * 100 + shift}


BLOCKS = (Blocks(name="transformer_blocks"),)
CASES = [
    Case(name="ltx", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="ltx-conditioned", build=build, inputs=conditioned, blocks=BLOCKS, tokens=18),
]
