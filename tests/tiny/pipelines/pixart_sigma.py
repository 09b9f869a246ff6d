"""PixArt sigma, and alpha at the sample size that makes its pipeline tell the model how large the image is."""

import importlib
from functools import partial
from typing import Any

from tests.tiny.autoencoders import kl_autoencoder, tiny_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import t5_text
from tests.tiny.tokenizers import t5_tokenizer
from tests.tiny.weights import randomised


def build(pipeline: str = "PixArtSigmaPipeline", *, sample_size: int = 32, tiny_vae: bool = False) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"sample_size": sample_size, "out_channels": 8, "num_layers": 4, "attention_head_dim": 12}
    sized = pipeline == "PixArtAlphaPipeline"
    make = tiny(diffusers.PixArtTransformer2DModel, **sizes, caption_channels=16, use_additional_conditions=sized)
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.DPMSolverMultistepScheduler(),
        vae=tiny_autoencoder(channels=4) if tiny_vae else kl_autoencoder(channels=4, scaling_factor=0.13025),
        text_encoder=t5_text(),
        tokenizer=t5_tokenizer(),
        transformer=randomised(make()),
    )


pixart = partial(
    Tiny,
    family="pixart_sigma",
    embedder="pos_embed",
    arguments=lambda pixels: {"use_resolution_binning": False},
    text=("encoder_hidden_states", "encoder_attention_mask"),
)
CASES = [
    pixart(name="pixart_sigma", build=build),
    pixart(name="pixart_alpha", build=partial(build, "PixArtAlphaPipeline", sample_size=128, tiny_vae=True)),
]
