"""Wan 2.1 and 2.2, VACE, Animate and ChronoEdit."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_chronoedit import ChronoEditTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan_animate import WanAnimateTransformer3DModel
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformer3DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 7
TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "out_channels": 4,
    "rope_max_seq_len": 16,
}
# layers that attend to image embeddings take the last 512 tokens of their context for the text, whatever its length
IMAGE: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": 24}


def build() -> WanTransformer3DModel:
    return WanTransformer3DModel(in_channels=4, num_layers=3, **TINY)


def build_i2v() -> WanTransformer3DModel:
    return WanTransformer3DModel(in_channels=9, num_layers=3, **TINY, **IMAGE)


def build_vace() -> WanVACETransformer3DModel:
    return WanVACETransformer3DModel(in_channels=4, vace_in_channels=6, num_layers=4, vace_layers=[0, 1, 3], **TINY)


def build_animate() -> WanAnimateTransformer3DModel:
    return WanAnimateTransformer3DModel(
        in_channels=12,
        latent_channels=4,
        motion_encoder_channel_sizes={"4": 4, "8": 4},
        motion_encoder_size=8,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=8,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
        num_layers=4,
        **TINY,
        **IMAGE,
    )


def build_chronoedit() -> ChronoEditTransformer3DModel:
    return ChronoEditTransformer3DModel(in_channels=9, rope_temporal_skip_len=8, num_layers=3, **TINY, **IMAGE)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),  # 3 frames of 2 x 3 tokens
        "timestep": torch.tensor([800.0, 300.0])[:batch],
        "encoder_hidden_states": random(2, batch, TEXT, 16),
    }


def i2v(batch: int) -> dict:
    return inputs(batch) | {
        "hidden_states": random(1, batch, 9, 3, 4, 6),
        "encoder_hidden_states": random(2, batch, 512, 16),
        "encoder_hidden_states_image": random(3, batch, 5, 16),
    }


def ti2v(batch: int) -> dict:
    """Every token has its own timestep."""
    return inputs(batch) | {"timestep": inputs(batch)["timestep"][:, None] * torch.linspace(0, 1, 18)}


def vace(batch: int) -> dict:
    return inputs(batch) | {
        "control_hidden_states": random(3, batch, 6, 3, 4, 6),
        "control_hidden_states_scale": torch.tensor([1.0, 0.5, 2.0]),
    }


def animate(batch: int) -> dict:
    """The first frame is the character; 5 frames of the face become 2, as many as the frames after it."""
    return i2v(batch) | {
        "hidden_states": random(1, batch, 12, 3, 4, 6),
        "pose_hidden_states": random(4, batch, 4, 2, 4, 6),
        "face_pixel_values": random(5, batch, 3, 5, 8, 8),
    }


def chronoedit(batch: int) -> dict:
    """Two frames, input and edit, stand apart in time."""
    return i2v(batch) | {"hidden_states": random(1, batch, 9, 2, 4, 6)}


BLOCKS = (Blocks(name="blocks"),)
CASES = [
    Case(name="wan", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="wan-i2v", build=build_i2v, inputs=i2v, blocks=BLOCKS, tokens=18),
    Case(name="wan-ti2v", build=build, inputs=ti2v, blocks=BLOCKS, tokens=18),
    Case(name="wan-vace", build=build_vace, inputs=vace, blocks=BLOCKS, tokens=18),
    Case(
        name="wan-animate",
        build=build_animate,
        inputs=animate,
        blocks=BLOCKS,
        tokens=18,
        references=6,
        references_at="first",
        defects={"compile": "the stock face encoder's backward fails under torch.compile, dense too."},
    ),
    Case(name="chronoedit", build=build_chronoedit, inputs=chronoedit, blocks=BLOCKS, tokens=12),
]
