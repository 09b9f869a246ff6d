"""Stable Diffusion 3, the same without its T5, and 3.5 medium's layers."""

import importlib
from functools import partial
from typing import Any

from tests.tiny.autoencoders import tiny_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import clip_text, t5_text
from tests.tiny.tokenizers import clip_tokenizer, t5_tokenizer
from tests.tiny.weights import randomised


def build(*, t5: bool = True, **config: Any) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"sample_size": 16, "in_channels": 16, "out_channels": 16, "num_layers": 4, "pos_embed_max_size": 16}
    texts = {"joint_attention_dim": 20, "caption_projection_dim": 32, "pooled_projection_dim": 16}
    transformer = tiny(diffusers.SD3Transformer2DModel, **sizes, **texts, **config)()
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=tiny_autoencoder(channels=16),
        text_encoder=clip_text(hidden=8, projection=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text(hidden=8, projection=True, seed=1),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_text(hidden=20) if t5 else None,
        tokenizer_3=t5_tokenizer() if t5 else None,
        transformer=randomised(transformer),
    )


sd3 = partial(Tiny, family="sd3", embedder="pos_embed")
CASES = [
    sd3(name="sd3", build=build),
    sd3(name="sd3-no-t5", build=partial(build, t5=False)),
    sd3(name="sd3.5", build=partial(build, dual_attention_layers=(0, 1), qk_norm="rms_norm")),
]
