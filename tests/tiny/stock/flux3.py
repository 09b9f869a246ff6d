"""FLUX.3: text to image, reference images, a flow map."""

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux3 import Flux3Transformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build(**options: Any) -> Flux3Transformer2DModel:
    return Flux3Transformer2DModel(
        in_channels=8,
        cond_in_channels=6,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        timestep_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        **options,
    )


def grid(rows: int, columns: int, time: int = 0) -> torch.Tensor:
    """FLUX.3's image ids: time, row, column, place in the text."""
    return torch.cartesian_prod(torch.tensor([time]), torch.arange(rows), torch.arange(columns), torch.tensor([0]))


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 15, 8),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "img_ids": grid(3, 5),
        "txt_ids": torch.cartesian_prod(*[torch.tensor([0])] * 3, torch.arange(TEXT)),
    }


def edit(batch: int) -> dict:
    more = {"image_cond_hidden_states": random(3, batch, 8, 6), "image_cond_ids": grid(2, 4, time=10)}
    return inputs(batch) | more


def distilled(batch: int) -> dict:
    return inputs(batch) | {"target_timestep": torch.linspace(0.1, 0.6, 2)[:batch]}


BLOCKS = (
    Blocks(name="mode_blocks.image"),
    Blocks(name="single_transformer_blocks", returns=1, image="first", keys=TEXT),
)
CASES = [
    Case(name="flux3", build=build, inputs=inputs, blocks=BLOCKS, tokens=15),
    Case(name="flux3-edit", build=build, inputs=edit, blocks=BLOCKS, tokens=15),
    Case(name="flux3-flow-map", build=partial(build, flow_map=True), inputs=distilled, blocks=BLOCKS, tokens=15),
]
