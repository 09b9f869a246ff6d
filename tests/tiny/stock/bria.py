"""Bria 3.2, with ControlNet, and Fibo: with and without its attention mask, Edit."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_bria import BriaTransformer2DModel
from diffusers.models.transformers.transformer_bria_fibo import BriaFiboTransformer2DModel

from tests.tiny.case import Blocks, Case, any_mask, grid, random, tiny, usual

TEXT = 5


def inputs(batch: int) -> dict:
    return usual(batch, (15, 8), (TEXT, 16), (200.0, 800.0)) | {"img_ids": grid(3, 5), "txt_ids": torch.zeros(TEXT, 3)}


def controlled(batch: int) -> dict:
    return inputs(batch) | {"controlnet_block_samples": [random(3 + i, batch, 15, 32) for i in range(2)]}


def layered(batch: int) -> dict:
    """Fibo reads another layer of the text encoder in each of its own."""
    return inputs(batch) | {"text_encoder_layers": [random(5 + i, batch, TEXT, 12) for i in range(4)]}


def masked(batch: int) -> dict:
    return layered(batch) | {"joint_attention_kwargs": {"attention_mask": any_mask(9, batch, TEXT + 15)}}


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
bria = partial(Case, build=tiny(BriaTransformer2DModel, in_channels=8, num_layers=2), blocks=BRIA, tokens=15)
build = tiny(BriaFiboTransformer2DModel, in_channels=8, num_layers=2, text_encoder_dim=12)
fibo = partial(Case, build=build, blocks=FIBO, tokens=15)
CASES = [
    bria(name="bria", inputs=inputs),
    bria(name="bria-controlnet", inputs=controlled),
    fibo(name="bria-fibo", inputs=layered),
    fibo(name="bria-fibo-masked", inputs=masked),
    fibo(name="bria-fibo-edit", inputs=edit, tokens=21, references=6),
]
