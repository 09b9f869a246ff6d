"""HunyuanImage 2.1, and its refiner, whose latents have a frame axis."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_hunyuanimage import HunyuanImageTransformer2DModel

from tests.tiny.case import GRAPHS, Case, random, tiny, usual, valid
from tests.tiny.stock.hunyuan_video import BLOCKS

SIZES = {"num_layers": 2, "mlp_ratio": 2.0, "text_embed_2_dim": 10, "patch_size": (1, 1), "rope_axes_dim": (8, 8)}
build = tiny(HunyuanImageTransformer2DModel, **SIZES)
one_text = partial(build, text_embed_2_dim=None, guidance_embeds=True, use_meanflow=True)
refiner = partial(one_text, patch_size=(1, 1, 1), rope_axes_dim=(4, 6, 6))


def inputs(batch: int) -> dict:
    return usual(batch, (4, 4, 6), (5, 12), (200.0, 800.0)) | {
        "encoder_attention_mask": valid(batch, 5, 3, 5).long(),
        "encoder_hidden_states_2": random(3, batch, 4, 10),
        "encoder_attention_mask_2": valid(batch, 4, 4, 1).long(),
    }


def refiner_inputs(batch: int) -> dict:
    return usual(batch, (4, 2, 3, 4), (5, 12), (200.0, 800.0)) | {
        "timestep_r": torch.tensor([100.0, 300.0])[:batch],
        "encoder_attention_mask": valid(batch, 5, 3, 5).long(),
        "guidance": torch.full((batch,), 3500.0),
    }


DEFECTS = {"checkpoint": "the stock forward passes keywords to a checkpoint function that takes none: a TypeError"}
case = partial(Case, blocks=BLOCKS, tokens=24, defects=DEFECTS)
CASES = [
    case(name="hunyuanimage", build=build, inputs=inputs, defects=DEFECTS | GRAPHS),
    case(name="hunyuanimage-refiner", build=refiner, inputs=refiner_inputs),
]
