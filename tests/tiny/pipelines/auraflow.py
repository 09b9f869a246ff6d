"""AuraFlow."""

import importlib
from typing import Any

from tests.tiny.autoencoders import kl_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import t5_text
from tests.tiny.tokenizers import t5_tokenizer
from tests.tiny.weights import randomised


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"sample_size": 16, "caption_projection_dim": 32, "pos_embed_max_size": 64}
    transformer = tiny(diffusers.AuraFlowTransformer2DModel, **sizes, num_mmdit_layers=2, num_single_dit_layers=3)()
    return diffusers.AuraFlowPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73),
        vae=kl_autoencoder(channels=4, scaling_factor=0.13025),
        text_encoder=t5_text(multilingual=True),
        tokenizer=t5_tokenizer(),
        transformer=randomised(transformer, scale=1.0),
    )


CASES = [Tiny(name="auraflow", family="auraflow", build=build, embedder="pos_embed")]
