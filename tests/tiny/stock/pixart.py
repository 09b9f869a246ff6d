"""PixArt sigma, alpha with its size conditions, and masks over the image tokens."""

from functools import partial

import torch
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

from tests.tiny.case import Blocks, Case, random

BLOCKS = (Blocks(name="transformer_blocks"),)
TEXT = 5


sigma = partial(
    PixArtTransformer2DModel,
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=8,
    num_layers=3,
    cross_attention_dim=24,
    sample_size=8,
    use_additional_conditions=False,
    caption_channels=10,
)
alpha = partial(sigma, use_additional_conditions=True)  # image sizes


def inputs(batch: int) -> dict:
    mask = torch.ones(2, TEXT)
    mask[1, 3:] = 0
    return {
        "hidden_states": random(1, batch, 4, 8, 12),
        "encoder_hidden_states": random(2, batch, TEXT, 10),
        "timestep": torch.tensor([200, 800])[:batch],
        "encoder_attention_mask": mask[:batch],
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def sized(batch: int) -> dict:
    sizes = {"resolution": torch.tensor([[64.0, 96.0], [512.0, 768.0]]), "aspect_ratio": torch.tensor([[0.7], [0.6]])}
    return inputs(batch) | {"added_cond_kwargs": {name: value[:batch] for name, value in sizes.items()}}


def masked(batch: int) -> dict:
    mask = torch.ones(2, 24)
    mask[0, -5:] = 0
    return inputs(batch) | {"attention_mask": mask[:batch]}


def biased(batch: int) -> dict:
    return inputs(batch) | {"attention_mask": random(3, batch, 24, 24)}


CASES = [
    Case(name="pixart", build=sigma, inputs=inputs, blocks=BLOCKS, tokens=24),
    Case(name="pixart-alpha", build=alpha, inputs=sized, blocks=BLOCKS, tokens=24),
    Case(name="pixart-masked", build=sigma, inputs=masked, blocks=BLOCKS, tokens=24),
    Case(name="pixart-biased", build=sigma, inputs=biased, blocks=BLOCKS, tokens=24),
]
