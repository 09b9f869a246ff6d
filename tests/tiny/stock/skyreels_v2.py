"""SkyReels-V2: T2V, I2V and diffusion forcing, with and without causal blocks of frames."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2Transformer3DModel

from tests.tiny.case import Blocks, Case, random

TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "rope_max_seq_len": 16,
}


def build() -> SkyReelsV2Transformer3DModel:
    return SkyReelsV2Transformer3DModel(inject_sample_info=True, **TINY)


def build_i2v() -> SkyReelsV2Transformer3DModel:
    return SkyReelsV2Transformer3DModel(image_dim=16, added_kv_proj_dim=24, **TINY)


def build_forcing() -> SkyReelsV2Transformer3DModel:
    return SkyReelsV2Transformer3DModel(**TINY)


def build_causal() -> SkyReelsV2Transformer3DModel:
    return SkyReelsV2Transformer3DModel(num_frame_per_block=2, **TINY)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 4, 4, 6),  # 4 frames of 2 x 3 tokens
        "timestep": torch.tensor([800, 300])[:batch],
        "encoder_hidden_states": random(2, batch, 7, 16),
        "fps": [0, 1][:batch],
    }


def i2v(batch: int) -> dict:
    return inputs(batch) | {
        "encoder_hidden_states": random(2, batch, 512, 16),
        "encoder_hidden_states_image": random(3, batch, 5, 16),
    }


def forcing(batch: int) -> dict:
    """A timestep per frame."""
    timestep = torch.tensor([[0, 200, 500, 900], [100, 300, 300, 700]])[:batch]
    return inputs(batch) | {"timestep": timestep, "enable_diffusion_forcing": True}


BLOCKS = (Blocks(name="blocks"),)
CASES = [
    Case(name="skyreels-v2", build=build, inputs=inputs, blocks=BLOCKS, tokens=24),
    Case(name="skyreels-v2-i2v", build=build_i2v, inputs=i2v, blocks=BLOCKS, tokens=24),
    Case(name="skyreels-v2-forcing", build=build_forcing, inputs=forcing, blocks=BLOCKS, tokens=24),
    Case(name="skyreels-v2-causal", build=build_causal, inputs=forcing, blocks=BLOCKS, tokens=24),
]
