"""HunyuanVideo 1.0 of text."""

import importlib
from typing import Any

from tests.tiny.autoencoders import hunyuan_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import clip_text, llama_text
from tests.tiny.tokenizers import clip_tokenizer, llama_tokenizer
from tests.tiny.weights import randomised


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1}
    texts = {"text_embed_dim": 16, "pooled_projection_dim": 16}
    transformer = tiny(diffusers.HunyuanVideoTransformer3DModel, **sizes, **texts)()
    return diffusers.HunyuanVideoPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=hunyuan_autoencoder(),
        text_encoder=llama_text(),
        tokenizer=llama_tokenizer(),
        text_encoder_2=clip_text(),
        tokenizer_2=clip_tokenizer(),
        transformer=randomised(transformer),
    )


CASES = [
    Tiny(
        name="hunyuanvideo1",
        family="hunyuanvideo1",
        build=build,
        embedder="x_embedder",
        frames=5,
        text=("encoder_hidden_states", "encoder_attention_mask"),
    )
]
