"""LTX-2: video and audio; 2.0 and 2.3; per-token timesteps; a mask between reference tokens and others."""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from torch import Tensor, nn

from tests.tiny.case import Blocks, Case, random

TEXT = 7
AUDIO = 5
TINY: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "cross_attention_dim": 24,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "num_layers": 3,
    "caption_channels": 16,
}


@dataclass(frozen=True, kw_only=True)
class AudioVideo(Case):
    """Both predictions count."""

    def call(self, model: nn.Module, arguments: dict[str, Any]) -> Tensor:
        video, audio = model(**arguments, return_dict=False)
        return torch.cat([video.flatten(1), audio.flatten(1)], dim=1)


def build() -> LTX2VideoTransformer3DModel:
    return LTX2VideoTransformer3DModel(**TINY)


def build_gated() -> LTX2VideoTransformer3DModel:
    """LTX-2.3: gates, a modulated text, rotations per head."""
    return LTX2VideoTransformer3DModel(
        gated_attn=True,
        cross_attn_mod=True,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        rope_type="split",
        perturbed_attn=True,
        use_prompt_embeddings=False,
        **TINY,
    )


def inputs(batch: int) -> dict:
    mask = (torch.arange(TEXT) < torch.tensor([[TEXT], [4]])[:batch]).long()
    return {
        "hidden_states": random(1, batch, 18, 8),
        "audio_hidden_states": random(2, batch, AUDIO, 4),
        "encoder_hidden_states": random(3, batch, TEXT, 16),
        "audio_encoder_hidden_states": random(4, batch, TEXT, 16),
        "timestep": torch.tensor([800.0, 300.0])[:batch],
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": 3,
        "height": 2,
        "width": 3,
        "audio_num_frames": AUDIO,
    }


def conditioned(batch: int) -> dict:
    """Every video token has its own timestep."""
    timestep = inputs(batch)["timestep"]
    return inputs(batch) | {"timestep": timestep[:, None] * torch.linspace(0, 1, 18), "audio_timestep": timestep}


def gated(batch: int) -> dict:
    return conditioned(batch) | {
        "encoder_hidden_states": random(3, batch, TEXT, 24),
        "audio_encoder_hidden_states": random(4, batch, TEXT, 16),
        "sigma": inputs(batch)["timestep"],
        "use_cross_timestep": True,
    }


def masked(batch: int) -> dict:
    """The last 6 tokens are a reference that looks at itself only, and is half seen by the others."""
    mask = torch.ones(batch, 18, 18)
    mask[:, 12:, :12] = 0
    mask[:, :12, 12:] = 0.9999
    return conditioned(batch) | {"video_self_attention_mask": mask}


BLOCKS = (Blocks(name="transformer_blocks", returns=0),)
CASES = [
    AudioVideo(name="ltx2", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    AudioVideo(name="ltx2-conditioned", build=build, inputs=conditioned, blocks=BLOCKS, tokens=18),
    AudioVideo(name="ltx2-gated", build=build_gated, inputs=gated, blocks=BLOCKS, tokens=18),
    AudioVideo(name="ltx2-masked", build=build, inputs=masked, blocks=BLOCKS, tokens=18),
]
