"""Helios, alone and with the history of a long video."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_helios import HeliosTransformer3DModel

from tests.tiny.case import Blocks, Case, random


def build(**options: Any) -> HeliosTransformer3DModel:
    return HeliosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=3,
        rope_dim=(4, 4, 4),
        **options,
    )


def build_amplified() -> HeliosTransformer3DModel:
    """The keys of the history are scaled, the text is seen by all tokens, and history has the sample's timestep."""
    return build(is_amplify_history=True, guidance_cross_attn=False, zero_history_timestep=False)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),  # 3 frames of 2 x 3 tokens
        "timestep": torch.tensor([800, 300])[:batch],
        "encoder_hidden_states": random(2, batch, 7, 16),
    }


def history(batch: int) -> dict:
    """7 frames before: 6 tokens of the last one, 2 of the two before it and 1 of the four before those."""

    def frames(first: int, last: int) -> torch.Tensor:
        return torch.arange(first, last).expand(batch, -1)

    return inputs(batch) | {
        "indices_hidden_states": frames(7, 10),
        "indices_latents_history_short": frames(6, 7),
        "indices_latents_history_mid": frames(4, 6),
        "indices_latents_history_long": frames(0, 4),
        "latents_history_short": random(3, batch, 4, 1, 4, 6),
        "latents_history_mid": random(4, batch, 4, 2, 4, 6),
        "latents_history_long": random(5, batch, 4, 4, 4, 6),
    }


BLOCKS = (Blocks(name="blocks"),)
CASES = [
    Case(name="helios", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="helios-history", build=build, inputs=history, blocks=BLOCKS, tokens=18),
    Case(name="helios-amplified", build=build_amplified, inputs=history, blocks=BLOCKS, tokens=18),
]
