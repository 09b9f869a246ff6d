"""Ovis-Image: with and without an attention mask."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_ovis_image import OvisImageTransformer2DModel

from tests.tiny.case import Blocks, Case, any_mask, grid, tiny, usual

TEXT = 5
build = tiny(OvisImageTransformer2DModel, in_channels=8, out_channels=8, num_layers=2)


def inputs(batch: int) -> dict:
    more = {"img_ids": grid(3, 5), "txt_ids": torch.arange(TEXT)[:, None].expand(-1, 3)}
    return usual(batch, (15, 8), (TEXT, 16)) | more


def masked(batch: int) -> dict:
    return inputs(batch) | {"joint_attention_kwargs": {"attention_mask": any_mask(3, batch, TEXT + 15)}}


BLOCKS = (Blocks(name="transformer_blocks", returns=1), Blocks(name="single_transformer_blocks", returns=1))
case = partial(Case, build=build, blocks=BLOCKS, tokens=15)
CASES = [case(name="ovis-image", inputs=inputs), case(name="ovis-image-masked", inputs=masked)]
