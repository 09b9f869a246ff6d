"""Kandinsky 6: video with audio, video alone, and a reference frame at the end."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_kandinsky6 import Kandinsky6Transformer3DModel

from tests.tiny.case import Blocks, Case, random

TEXT, AUDIO = 5, 7


def build(**more: Any) -> Kandinsky6Transformer3DModel:
    config: dict[str, Any] = {
        "in_visual_dim": 4,
        "out_visual_dim": 4,
        "in_text_dim": 12,
        "in_text_dim2": 8,
        "time_dim": 16,
        "model_dim": 32,
        "ff_dim": 32,
        "num_text_blocks": 1,
        "num_visual_blocks": 3,
        "axes_dims": (4, 6, 6),
        "in_audio_dim": 6,
        "out_audio_dim": 6,
    }
    return Kandinsky6Transformer3DModel(**config | more)


def released() -> Kandinsky6Transformer3DModel:
    """The switches the released checkpoints set, and an audio width of its own."""
    more = {"ca_rope": True, "cross_gates": True, "fix_modulation": True, "model_dim_a": 16, "axes_dims_a": (4, 6, 6)}
    return build(text_token_padding=True, **more)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 3, 4, 6, 9),
        "encoder_hidden_states": random(2, batch, TEXT, 12),
        "pooled_projections": random(3, batch, 8),
        "timestep": torch.tensor([200.0, 800.0])[:batch],
    }


def with_audio(batch: int) -> dict:
    return inputs(batch) | {
        "audio_hidden_states": random(4, batch, AUDIO, 6),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:batch].bool(),
    }


def with_reference(batch: int) -> dict:
    return inputs(batch) | {
        "hidden_states": random(1, batch, 4, 4, 6, 9),
        "visual_token_type_ids": torch.tensor([[0, 0, 0, 1]] * batch),
        "visual_rope_pos": [torch.tensor([0, 1, 2, 0]), torch.arange(2), torch.arange(3)],
    }


BLOCKS = (Blocks(name="visual_transformer_blocks", keyword="vis", returns=0),)
CASES = [
    Case(name="kandinsky6", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="kandinsky6-audio", build=released, inputs=with_audio, blocks=BLOCKS, tokens=18),
    Case(
        name="kandinsky6-reference",
        build=lambda: build(visual_token_type_num_embeddings=2),
        inputs=with_reference,
        blocks=BLOCKS,
        tokens=24,
        references=6,
    ),
]
