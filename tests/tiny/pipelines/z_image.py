"""Z-Image."""

import importlib
from typing import Any

from tests.tiny.autoencoders import kl_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import qwen3_text
from tests.tiny.tokenizers import qwen3_tokenizer
from tests.tiny.weights import randomised


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 16, "dim": 32, "n_layers": 4, "n_kv_heads": 2, "cap_feat_dim": 16}
    rotations = {"axes_dims": [4, 6, 6], "axes_lens": [600, 16, 16]}
    transformer = tiny(diffusers.ZImageTransformer2DModel, **sizes, **rotations)()
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=kl_autoencoder(channels=16, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=qwen3_text(hidden=16, layers=3),
        tokenizer=qwen3_tokenizer(),
        transformer=randomised(transformer),
    )


CASES = [Tiny(name="z_image", family="z_image", build=build, embedder="all_x_embedder.2-1")]
