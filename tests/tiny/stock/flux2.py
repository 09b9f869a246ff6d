"""FLUX.2: text to image, reference images, an attention mask."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVParallelSelfAttnProcessor,
    Flux2Transformer2DModel,
)

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build() -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=8,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )


def grid(rows: int, columns: int, time: int = 0) -> torch.Tensor:
    """FLUX.2's image ids: time, row, column, place in the text."""
    return torch.cartesian_prod(torch.tensor([time]), torch.arange(rows), torch.arange(columns), torch.tensor([0]))


def inputs(batch: int) -> dict:
    text = torch.cartesian_prod(*[torch.tensor([0])] * 3, torch.arange(TEXT))
    return {
        "hidden_states": random(1, batch, 15, 8),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "guidance": torch.full((batch,), 3.5),
        "img_ids": grid(3, 5).expand(batch, -1, -1),
        "txt_ids": text.expand(batch, -1, -1),
    }


def edit(batch: int) -> dict:
    ids = torch.cat([grid(3, 5), grid(2, 3, time=10), grid(1, 2, time=20)])
    return inputs(batch) | {"hidden_states": random(3, batch, 23, 8), "img_ids": ids.expand(batch, -1, -1)}


def masked(batch: int) -> dict:
    """Any mask over queries and keys in which each token sees itself."""
    length = TEXT + 15
    mask = (random(4, batch, 1, length, length) > -1) | torch.eye(length, dtype=torch.bool)
    return inputs(batch) | {"joint_attention_kwargs": {"attention_mask": mask}}


def cached(model: Any, batch: int) -> dict:
    """Reference tokens first, kept for the next steps of sampling."""
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    return inputs(batch) | {"kv_cache_mode": "extract", "num_ref_tokens": 5}


BLOCKS = (Blocks(name="transformer_blocks", returns=1), Blocks(name="single_transformer_blocks"))
CASES = [
    Case(name="flux2", build=build, inputs=inputs, blocks=BLOCKS, tokens=15, refused=cached),
    Case(name="flux2-edit", build=build, inputs=edit, blocks=BLOCKS, tokens=23, references=8),
    Case(name="flux2-masked", build=build, inputs=masked, blocks=BLOCKS, tokens=15),
]
