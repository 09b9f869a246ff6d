"""Qwen-Image 2.1: text to image, condition images, one timestep for all tokens, a cached prompt."""

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21FlexAttnProcessor,
    QwenImage21KVLayerCache,
    QwenImage21Transformer2DModel,
)

from tests.tiny.case import GRAPHS, Blocks, Case, random, tiny, usual, valid

TEXT = 7
build = tiny(QwenImage21Transformer2DModel, in_channels=8, out_channels=8, context_in_dim=12)


def inputs(batch: int) -> dict:
    """A target of 4 x 5 tokens: five slots of four after the text, whose last words are padding in one sample."""
    return usual(batch, (20, 8), (TEXT, 12)) | {
        "img_shapes": [[(1, 4, 5)]] * batch,
        "img_mask": torch.tensor([False] * TEXT + [True] * 5).expand(batch, -1),
        "encoder_hidden_states_mask": valid(batch, TEXT, TEXT, TEXT - 2).long(),
    }


def edit(batch: int) -> dict:
    """A condition image of 2 x 2 tokens in the fourth place of the text."""
    mask = torch.tensor([False] * TEXT + [True] * 5)
    mask[3] = True
    return inputs(batch) | {
        "hidden_states": random(3, batch, 24, 8),
        "img_shapes": [[(1, 2, 2), (1, 4, 5)]] * batch,
        "img_mask": mask.expand(batch, -1),
    }


def unmasked(batch: int) -> dict:
    return edit(batch) | {"encoder_hidden_states_mask": None}


class Prompts(list):
    """The cached prompts by sample: the model asks it for a layer, the contract cuts it as a list."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Prompts(found) if isinstance(index, slice) else found

    def get_layer(self, index: int) -> QwenImage21KVLayerCache:
        cache = QwenImage21KVLayerCache()
        keys, values = torch.stack([prompt[index] for prompt in self], dim=1)
        cache.store(keys, values)
        return cache


def cached(batch: int) -> dict:
    """Keys and values of three layers for each prompt."""
    return inputs(batch) | {"kv_cache": Prompts(random(4, batch, 3, 2, TEXT, 2, 16)), "kv_cache_mode": "cached"}


def flexible(model: Any, batch: int) -> dict:
    for block in model.transformer_blocks:
        block.attn.set_processor(QwenImage21FlexAttnProcessor())
    return inputs(batch)


BLOCKS = (Blocks(name="transformer_blocks", image_queries=True),)
case = partial(Case, build=build, blocks=BLOCKS, tokens=20, defects=GRAPHS)
CASES = [
    case(name="qwenimage21", inputs=inputs, refused=flexible),
    case(name="qwenimage21-edit", inputs=edit),
    case(name="qwenimage21-one-time", build=partial(build, causal_condition=False), inputs=unmasked),
    case(name="qwenimage21-cached", inputs=cached),
]
