"""Chroma: with and without its attention mask, ControlNet."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_chroma import ChromaTransformer2DModel

from tests.tiny.case import Blocks, Case, grid, random, tiny, usual

TEXT = 5
APPROXIMATOR = {"approximator_num_channels": 16, "approximator_hidden_dim": 16, "approximator_layers": 1}
build = tiny(ChromaTransformer2DModel, in_channels=8, num_layers=2, num_single_layers=3, **APPROXIMATOR)


def inputs(batch: int) -> dict:
    return usual(batch, (15, 8), (TEXT, 16)) | {"img_ids": grid(3, 5), "txt_ids": torch.zeros(TEXT, 3)}


def masked(batch: int) -> dict:
    mask = torch.ones(2, TEXT + 15, dtype=torch.bool)
    mask[1, 3:TEXT] = False
    return inputs(batch) | {"attention_mask": mask[:batch]}


def controlled(batch: int) -> dict:
    return inputs(batch) | {
        "controlnet_block_samples": [random(3, batch, 15, 32)],
        "controlnet_single_block_samples": [random(4 + i, batch, 15, 32) for i in range(3)],
    }


BLOCKS = (Blocks(name="transformer_blocks", returns=1), Blocks(name="single_transformer_blocks"))
DEFECTS = {"checkpoint": "stock Chroma does not pass the attention mask to checkpointed single layers"}
case = partial(Case, build=build, blocks=BLOCKS, tokens=15)
CASES = [
    case(name="chroma", inputs=inputs),
    case(name="chroma-masked", inputs=masked, defects=DEFECTS),
    case(name="chroma-controlnet", inputs=controlled),
]
