"""ERNIE-Image: texts of other lengths."""

import torch
from diffusers.models.transformers.transformer_ernie_image import ErnieImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 6


def build() -> ErnieImageTransformer2DModel:
    return ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=3,
        ffn_hidden_size=32,
        in_channels=4,
        out_channels=4,
        patch_size=2,
        text_in_dim=12,
        rope_axes_dim=(4, 6, 6),
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 6, 10),
        "timestep": torch.linspace(200, 800, 2)[:batch],
        "text_bth": random(2, batch, TEXT, 12),
        "text_lens": torch.tensor([6, 4])[:batch],
    }


BLOCKS = (Blocks(name="layers", keyword="x", dim=0, image="first", keys="first"),)
CASES = [Case(name="ernie-image", build=build, inputs=inputs, blocks=BLOCKS, tokens=15)]
