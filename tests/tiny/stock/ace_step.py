"""ACE-Step 1.5: layers with a sliding window and layers without take turns; an odd length is padded."""

import torch
from diffusers.models.transformers.ace_step_transformer import AceStepTransformer1DModel

from tests.tiny.case import Blocks, Case, random


def build() -> AceStepTransformer1DModel:
    return AceStepTransformer1DModel(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        in_channels=10,
        audio_acoustic_hidden_dim=4,
        patch_size=2,
        sliding_window=3,
        encoder_hidden_size=12,
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 35, 4),
        "timestep": torch.tensor([0.2, 0.8])[:batch],
        "timestep_r": torch.tensor([0.1, 0.8])[:batch],
        "encoder_hidden_states": random(2, batch, 5, 12),
        "context_latents": random(3, batch, 35, 6),
    }


CASES = [Case(name="ace-step", build=build, inputs=inputs, blocks=(Blocks(name="layers"),), tokens=18)]
