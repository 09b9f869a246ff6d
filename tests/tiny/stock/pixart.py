"""PixArt sigma, alpha with its size conditions, and masks over the image tokens."""

from functools import partial

import torch
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

TEXT = 5
SIZES = {"attention_head_dim": 12, "out_channels": 8, "sample_size": 8, "caption_channels": 10}
sigma = tiny(PixArtTransformer2DModel, **SIZES, use_additional_conditions=False)
alpha = partial(sigma, use_additional_conditions=True)  # image sizes


def inputs(batch: int) -> dict:
    return usual(batch, (4, 8, 12), (TEXT, 10), (200, 800)) | {
        "encoder_attention_mask": valid(batch, TEXT, 5, 3).float(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def sized(batch: int) -> dict:
    sizes = {"resolution": torch.tensor([[64.0, 96.0], [512.0, 768.0]]), "aspect_ratio": torch.tensor([[0.7], [0.6]])}
    return inputs(batch) | {"added_cond_kwargs": {name: value[:batch] for name, value in sizes.items()}}


def masked(batch: int) -> dict:
    return inputs(batch) | {"attention_mask": valid(batch, 24, 19, 24).float()}


def biased(batch: int) -> dict:
    return inputs(batch) | {"attention_mask": random(3, batch, 24, 24)}


case = partial(Case, build=sigma, blocks=(Blocks(name="transformer_blocks"),), tokens=24)
CASES = [
    case(name="pixart", inputs=inputs),
    case(name="pixart-alpha", build=alpha, inputs=sized),
    case(name="pixart-masked", inputs=masked),
    case(name="pixart-biased", inputs=biased),
]
