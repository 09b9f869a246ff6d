"""LTX-2: video and audio; 2.0 and 2.3; per-token timesteps; a mask between reference tokens and others."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from torch import Tensor, nn

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid
from tests.tiny.stock.ltx import SIZES, VIDEO

TEXT = 7
AUDIO = 5
AUDIO_SIZES = {"audio_num_attention_heads": 2, "audio_attention_head_dim": 8, "audio_cross_attention_dim": 16}
build = tiny(LTX2VideoTransformer3DModel, **SIZES, **AUDIO_SIZES)
# LTX-2.3: gates, a modulated text, rotations per head
GATES = {"gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True}
build_gated = partial(build, **GATES, rope_type="split", perturbed_attn=True, use_prompt_embeddings=False)


@dataclass(frozen=True, kw_only=True)
class AudioVideo(Case):
    """Both predictions count."""

    def call(self, model: nn.Module, arguments: dict[str, Any]) -> Tensor:
        video, audio = model(**arguments, return_dict=False)
        return torch.cat([video.flatten(1), audio.flatten(1)], dim=1)


def inputs(batch: int) -> dict:
    mask = valid(batch, TEXT, TEXT, 4).long()
    return usual(batch, (18, 8), (TEXT, 16), (800.0, 300.0)) | {
        "audio_hidden_states": random(2, batch, AUDIO, 4),
        "encoder_hidden_states": random(3, batch, TEXT, 16),
        "audio_encoder_hidden_states": random(4, batch, TEXT, 16),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "audio_num_frames": AUDIO,
        **VIDEO,
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


case = partial(AudioVideo, build=build, blocks=(Blocks(name="transformer_blocks", returns=0),), tokens=18)
CASES = [
    case(name="ltx2", inputs=inputs),
    case(name="ltx2-conditioned", inputs=conditioned),
    case(name="ltx2-gated", build=build_gated, inputs=gated),
    case(name="ltx2-masked", inputs=masked),
]
