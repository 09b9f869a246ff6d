"""Chroma."""

import importlib
from typing import Any

from tests.tiny.autoencoders import kl_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.pipelines.flux import pack
from tests.tiny.text_encoders import t5_text
from tests.tiny.tokenizers import t5_tokenizer
from tests.tiny.weights import randomised


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 64, "num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 16}
    guide = {"approximator_num_channels": 16, "approximator_hidden_dim": 16, "approximator_layers": 1}
    transformer = tiny(diffusers.ChromaTransformer2DModel, **sizes, **guide)()
    return diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=kl_autoencoder(channels=16, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=t5_text(),
        tokenizer=t5_tokenizer(),
        transformer=randomised(transformer),
    )


CASES = [
    Tiny(
        name="chroma",
        family="chroma",
        build=build,
        embedder="x_embedder",
        pack=pack,
        waits=("guidance_proj = self.guidance_proj(torch.tensor([0] * batch_size)).to(",),
    )
]
