"""Stable Audio 3: memory tokens, differential attention, patches, and the inpainting condition."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_stable_audio3 import StableAudio3DiTModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build(**more: Any) -> StableAudio3DiTModel:
    config: dict[str, Any] = {
        "io_channels": 4,
        "embed_dim": 32,
        "depth": 3,
        "num_heads": 2,
        "cond_token_dim": 12,
        "global_cond_dim": 8,
        "local_add_cond_dim": 5,
        "timestep_features_dim": 8,
        "ff_mult": 2.0,
        "num_memory_tokens": 3,
    }
    return StableAudio3DiTModel(**config | more)


def patched() -> StableAudio3DiTModel:
    return build(patch_size=2, use_differential_attention=False)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 18),
        "timestep": torch.tensor([0.2, 0.8])[:batch],
        "encoder_hidden_states": random(2, batch, TEXT, 12),
        "global_hidden_states": random(3, batch, 8),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:batch].bool(),
    }


def inpainting(batch: int) -> dict:
    return inputs(batch) | {"local_add_cond": random(4, batch, 5, 18)}


def longer(batch: int) -> dict:
    return inputs(batch) | {"hidden_states": random(1, batch, 4, 32)}


BLOCKS = (Blocks(name="transformer_blocks"),)
CASES = [
    Case(name="stable-audio3", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="stable-audio3-inpainting", build=build, inputs=inpainting, blocks=BLOCKS, tokens=18),
    Case(name="stable-audio3-patches", build=patched, inputs=longer, blocks=BLOCKS, tokens=16),
]
