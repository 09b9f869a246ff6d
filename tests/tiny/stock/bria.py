"""Bria 3.2, with ControlNet, and Fibo: with and without its attention mask, Edit."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_bria import BriaTransformer2DModel
from diffusers.models.transformers.transformer_bria_fibo import BriaFiboTransformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5
SIZE: dict[str, Any] = {
    "in_channels": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": [4, 6, 6],
}


def bria() -> BriaTransformer2DModel:
    return BriaTransformer2DModel(**SIZE)


def fibo() -> BriaFiboTransformer2DModel:
    return BriaFiboTransformer2DModel(**SIZE, text_encoder_dim=12)


def grid(rows: int, columns: int, image: int = 0) -> torch.Tensor:
    return torch.cartesian_prod(torch.tensor([image]), torch.arange(rows), torch.arange(columns))


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 15, 8),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "timestep": torch.linspace(200, 800, 2)[:batch],
        "img_ids": grid(3, 5),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def controlled(batch: int) -> dict:
    return inputs(batch) | {"controlnet_block_samples": [random(3 + i, batch, 15, 32) for i in range(2)]}


def layered(batch: int) -> dict:
    """Fibo reads another layer of the text encoder in each of its own."""
    return inputs(batch) | {"text_encoder_layers": [random(5 + i, batch, TEXT, 12) for i in range(4)]}


def masked(batch: int) -> dict:
    """Any mask over queries and keys in which each token sees itself."""
    mask = (random(9, batch, 1, TEXT + 15, TEXT + 15) > -1) | torch.eye(TEXT + 15, dtype=torch.bool)
    return layered(batch) | {"joint_attention_kwargs": {"attention_mask": mask}}


def edit(batch: int) -> dict:
    """Padding in the second text is no key."""
    mask = torch.ones(2, 1, 1, TEXT + 21, dtype=torch.bool)
    mask[1, ..., 3:TEXT] = False
    return layered(batch) | {
        "hidden_states": random(10, batch, 21, 8),
        "img_ids": torch.cat([grid(3, 5), grid(2, 3, image=1)]),
        "joint_attention_kwargs": {"attention_mask": mask[:batch]},
    }


DOUBLE = Blocks(name="transformer_blocks", returns=1)
BRIA = (DOUBLE, Blocks(name="single_transformer_blocks", returns=1))
FIBO = (DOUBLE, Blocks(name="single_transformer_blocks"))
CASES = [
    Case(name="bria", build=bria, inputs=inputs, blocks=BRIA, tokens=15),
    Case(name="bria-controlnet", build=bria, inputs=controlled, blocks=BRIA, tokens=15),
    Case(name="bria-fibo", build=fibo, inputs=layered, blocks=FIBO, tokens=15),
    Case(name="bria-fibo-masked", build=fibo, inputs=masked, blocks=FIBO, tokens=15),
    Case(name="bria-fibo-edit", build=fibo, inputs=edit, blocks=FIBO, tokens=21, references=6),
]
