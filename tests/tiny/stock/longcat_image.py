"""LongCat-Image: text to image, Edit."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_longcat_image import LongCatImageTransformer2DModel

from tests.tiny.case import Blocks, Case, grid, random, tiny, usual

TEXT = 5

build = tiny(LongCatImageTransformer2DModel, in_channels=8, num_layers=2)


def ids(rows: int, columns: int, kind: int) -> torch.Tensor:
    """LongCat's image ids: 1 for the target or 2 for the reference, row, column, both after the text's."""
    return grid(rows, columns, kind) + torch.tensor([0, TEXT, TEXT])


def inputs(batch: int) -> dict:
    text = torch.arange(TEXT)[:, None] * torch.tensor([0, 1, 1])
    return usual(batch, (15, 8), (TEXT, 16)) | {"img_ids": ids(3, 5, 1), "txt_ids": text}


def edit(batch: int) -> dict:
    more = {"hidden_states": random(3, batch, 21, 8), "img_ids": torch.cat([ids(3, 5, 1), ids(2, 3, 2)])}
    return inputs(batch) | more


BLOCKS = (Blocks(name="transformer_blocks", returns=1), Blocks(name="single_transformer_blocks", returns=1))
case = partial(Case, build=build, blocks=BLOCKS)
CASES = [
    case(name="longcat-image", inputs=inputs, tokens=15),
    case(name="longcat-image-edit", inputs=edit, tokens=21, references=6),
]
