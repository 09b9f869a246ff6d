"""Qwen-Image: text to image, Edit (with and without per-token modulation), Layered, ControlNet."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

TEXT = 6
build = tiny(QwenImageTransformer2DModel, in_channels=8, out_channels=2)


def inputs(batch: int, shapes: tuple[tuple[int, int, int], ...] = ((1, 3, 5),)) -> dict:
    tokens = sum(rows * columns for _, rows, columns in shapes)
    more = {"encoder_hidden_states_mask": valid(batch, TEXT, 6, 4).long(), "img_shapes": [list(shapes)] * batch}
    return usual(batch, (tokens, 8), (TEXT, 16)) | more


def unmasked(batch: int) -> dict:
    return inputs(batch) | {"encoder_hidden_states_mask": None}


def controlled(batch: int) -> dict:
    return inputs(batch) | {"controlnet_block_samples": [random(3 + i, batch, 15, 32) for i in range(2)]}


def layered(batch: int) -> dict:
    return inputs(batch, ((1, 2, 3),) * 4) | {"additional_t_cond": torch.tensor([0, 1])[:batch]}


case = partial(Case, build=build, inputs=inputs, blocks=(Blocks(name="transformer_blocks", returns=1),), tokens=15)
edit = partial(case, inputs=partial(inputs, shapes=((1, 3, 5), (1, 2, 3), (1, 1, 4))), tokens=25, references=10)
in_layers = partial(build, use_additional_t_cond=True, use_layer3d_rope=True)
CASES = [
    case(name="qwenimage"),
    case(name="qwenimage-unmasked", inputs=unmasked),
    edit(name="qwenimage-edit"),
    edit(name="qwenimage-edit-zero-cond", build=partial(build, zero_cond_t=True)),
    case(name="qwenimage-layered", build=in_layers, inputs=layered, tokens=24, references=6),
    case(name="qwenimage-controlnet", inputs=controlled),
]
