"""Krea 2: with and without a text mask."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel

from tests.tiny.case import Blocks, Case, grid, tiny, usual, valid

TEXT = 5
SIZES = {"in_channels": 8, "timestep_embed_dim": 16}
TEXT_LAYERS = {"num_text_layers": 3, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
TEXT_HEADS = {"text_num_attention_heads": 2, "text_num_key_value_heads": 2}
TEXT_WIDTHS = {"text_hidden_dim": 16, "text_intermediate_size": 16}
build = tiny(Krea2Transformer2DModel, **SIZES, **TEXT_LAYERS, **TEXT_HEADS, **TEXT_WIDTHS)


def inputs(batch: int) -> dict:
    return usual(batch, (15, 8), (TEXT, 3, 16)) | {"position_ids": torch.cat([torch.zeros(TEXT, 3), grid(3, 5)])}


def masked(batch: int) -> dict:
    return inputs(batch) | {"encoder_attention_mask": valid(batch, TEXT, 5, 3)}


case = partial(Case, build=build, blocks=(Blocks(name="transformer_blocks"),), tokens=15)
CASES = [case(name="krea2", inputs=inputs), case(name="krea2-masked", inputs=masked)]
