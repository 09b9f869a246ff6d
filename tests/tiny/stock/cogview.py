"""CogView3-Plus, and CogView4: with a text mask, and with the attention it trains with."""

from functools import partial
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_cogview3plus import CogView3PlusTransformer2DModel
from diffusers.models.transformers.transformer_cogview4 import CogView4TrainingAttnProcessor, CogView4Transformer2DModel

from tests.tiny.case import Blocks, Case, tiny, usual

SIZES = {"attention_head_dim": 8, "text_embed_dim": 10, "time_embed_dim": 12, "condition_dim": 2, "sample_size": 8}
build_3 = tiny(CogView3PlusTransformer2DModel, **SIZES)
build_4 = tiny(CogView4Transformer2DModel, **SIZES, rope_axes_dim=(16, 16))


def build_training() -> CogView4Transformer2DModel:
    model = build_4()
    processor: Any = CogView4TrainingAttnProcessor()
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(processor)
    return model


def inputs(batch: int) -> dict:
    return usual(batch, (4, 8, 12), (5, 10), (200, 800)) | {
        "original_size": torch.tensor([[64.0, 96.0], [512.0, 768.0]])[:batch],
        "target_size": torch.tensor([[64.0, 96.0], [64.0, 96.0]])[:batch],
        "crop_coords": torch.tensor([[0.0, 0.0], [8.0, 4.0]])[:batch],
    }


def masked(batch: int) -> dict:
    mask = torch.ones(2, 5)
    mask[1, :2] = 0
    return inputs(batch) | {"attention_mask": mask[:batch]}


def padded(batch: int) -> dict:
    text, latents = torch.ones(2, 5, dtype=torch.int32), torch.ones(2, 24, dtype=torch.int32)
    text[1, :2] = 0
    latents[0, -5:] = 0
    return inputs(batch) | {"attention_kwargs": {"text_attn_mask": text[:batch], "latent_attn_mask": latents[:batch]}}


case = partial(Case, blocks=(Blocks(name="transformer_blocks", returns=0),), tokens=24)
CASES = [
    case(name="cogview3", build=build_3, inputs=inputs),
    case(name="cogview4", build=build_4, inputs=inputs),
    case(name="cogview4-masked", build=build_4, inputs=masked),
    case(name="cogview4-training", build=build_training, inputs=padded),
]
