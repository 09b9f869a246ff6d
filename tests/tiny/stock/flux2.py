"""FLUX.2: text to image, reference images, an attention mask."""

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVParallelSelfAttnProcessor,
    Flux2Transformer2DModel,
)

from tests.tiny.case import Blocks, Case, any_mask, random, tiny, usual

TEXT = 5
SIZES = {"in_channels": 8, "num_layers": 2, "axes_dims_rope": (4, 4, 4, 4)}
build = tiny(Flux2Transformer2DModel, **SIZES, timestep_guidance_channels=16)


def grid(rows: int, columns: int, time: int = 0) -> torch.Tensor:
    """FLUX.2's image ids: time, row, column, place in the text."""
    return torch.cartesian_prod(torch.tensor([time]), torch.arange(rows), torch.arange(columns), torch.tensor([0]))


def text_ids() -> torch.Tensor:
    return torch.cartesian_prod(*[torch.tensor([0])] * 3, torch.arange(TEXT))


def inputs(batch: int) -> dict:
    return usual(batch, (15, 8), (TEXT, 16)) | {
        "guidance": torch.full((batch,), 3.5),
        "img_ids": grid(3, 5).expand(batch, -1, -1),
        "txt_ids": text_ids().expand(batch, -1, -1),
    }


def edit(batch: int) -> dict:
    ids = torch.cat([grid(3, 5), grid(2, 3, time=10), grid(1, 2, time=20)])
    return inputs(batch) | {"hidden_states": random(3, batch, 23, 8), "img_ids": ids.expand(batch, -1, -1)}


def masked(batch: int) -> dict:
    return inputs(batch) | {"joint_attention_kwargs": {"attention_mask": any_mask(4, batch, TEXT + 15)}}


def cached(model: Any, batch: int) -> dict:
    """Reference tokens first, kept for the next steps of sampling."""
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    return inputs(batch) | {"kv_cache_mode": "extract", "num_ref_tokens": 5}


BLOCKS = (Blocks(name="transformer_blocks", returns=1), Blocks(name="single_transformer_blocks"))
case = partial(Case, build=build, blocks=BLOCKS, tokens=15)
CASES = [
    case(name="flux2", inputs=inputs, refused=cached),
    case(name="flux2-edit", inputs=edit, tokens=23, references=8),
    case(name="flux2-masked", inputs=masked),
]
