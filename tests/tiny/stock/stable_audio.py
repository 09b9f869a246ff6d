"""Stable Audio Open: a global token before the audio tokens, with and without masks."""

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from diffusers.models.transformers.stable_audio_transformer import StableAudioDiTModel

from tests.tiny.case import Blocks, Case, random

TOKENS, TEXT = 18, 5


def build() -> StableAudioDiTModel:
    return StableAudioDiTModel(
        sample_size=TOKENS,
        in_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        out_channels=4,
        cross_attention_dim=16,
        time_proj_dim=8,
        global_states_input_dim=10,
        cross_attention_input_dim=12,
    )


def inputs(batch: int) -> dict:
    table = get_1d_rotary_pos_embed(8, TOKENS + 1, use_real=True, repeat_interleave_real=False)
    return {
        "hidden_states": random(1, batch, 4, TOKENS),
        "timestep": torch.tensor([0.2, 0.8])[:batch],
        "encoder_hidden_states": random(2, batch, TEXT, 12),
        "global_hidden_states": random(3, batch, 1, 10),
        "rotary_embedding": table,
    }


def masked(batch: int) -> dict:
    audio = torch.ones(batch, TOKENS, dtype=torch.bool)
    audio[:, -2:] = False
    return inputs(batch) | {
        "attention_mask": audio,
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:batch].bool(),
    }


BLOCKS = (Blocks(name="transformer_blocks"),)
CASES = [
    Case(name="stable-audio", build=build, inputs=inputs, blocks=BLOCKS, tokens=TOKENS),
    Case(name="stable-audio-masked", build=build, inputs=masked, blocks=BLOCKS, tokens=TOKENS),
]
