"""LongCat AudioDiT: modulation shared by all layers or their own, with and without a mask of the audio."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_longcat_audio_dit import LongCatAudioDiTTransformer

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build(**more: Any) -> LongCatAudioDiTTransformer:
    config: dict[str, Any] = {"dit_dim": 32, "dit_depth": 3, "dit_heads": 2, "dit_text_dim": 12, "latent_dim": 4}
    return LongCatAudioDiTTransformer(**config | more, ff_mult=2.0)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 18, 4),
        "encoder_hidden_states": random(2, batch, TEXT, 12),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:batch].bool(),
        "timestep": torch.tensor([0.2, 0.8])[:batch],
        "latent_cond": random(3, batch, 18, 4),
    }


def masked(batch: int) -> dict:
    audio = torch.ones(2, 18, dtype=torch.bool)
    audio[1, -4:] = False
    return inputs(batch) | {"attention_mask": audio[:batch], "latent_cond": None}


BLOCKS = (Blocks(name="blocks"),)
CASES = [
    Case(name="longcat-audio", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(
        name="longcat-audio-masked",
        build=lambda: build(adaln_type="local", cross_attn_norm=True, use_latent_condition=False),
        inputs=masked,
        blocks=BLOCKS,
        tokens=18,
    ),
]
