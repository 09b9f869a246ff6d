"""Hunyuan-DiT 1.1 and 1.2, whose second half takes up the streams of the first, with and without ControlNet."""

from functools import partial

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.models.transformers.hunyuan_transformer_2d import HunyuanDiT2DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

SIZES = {"in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 16, "attention_head_dim": 8}
CONDITIONS = {"cross_attention_dim": 12, "cross_attention_dim_t5": 8, "pooled_projection_dim": 10}
# an even number of layers, or the stock class runs out of skips
build = tiny(HunyuanDiT2DModel, **SIZES, **CONDITIONS, num_layers=6, text_len=3, text_len_t5=4)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 8, 12), (3, 12), (200.0, 800.0)) | {
        "text_embedding_mask": valid(batch, 3, 3, 2).float(),
        "encoder_hidden_states_t5": random(3, batch, 4, 8),
        "text_embedding_mask_t5": valid(batch, 4, 1, 4).float(),
        "image_rotary_emb": get_2d_rotary_pos_embed(8, ((0, 0), (4, 6)), (4, 6), output_type="pt"),
    }


def styled(batch: int) -> dict:
    sizes = torch.tensor([[64.0, 96.0, 64.0, 96.0, 0.0, 0.0], [512.0, 768.0, 64.0, 96.0, 8.0, 4.0]])
    return inputs(batch) | {"image_meta_size": sizes[:batch], "style": torch.zeros(batch, dtype=torch.int64)}


def controlled(batch: int) -> dict:
    return inputs(batch) | {"controlnet_block_samples": [random(4, batch, 24, 16), random(5, batch, 24, 16)]}


plain = partial(build, use_style_cond_and_image_meta_size=False)
case = partial(Case, build=plain, blocks=(Blocks(name="blocks"),), tokens=24)
CASES = [
    case(name="hunyuan-dit-1.1", build=build, inputs=styled),
    case(name="hunyuan-dit", inputs=inputs),
    case(name="hunyuan-dit-controlnet", inputs=controlled),
]
