"""Krea 2."""

import importlib
from typing import Any

from tests.tiny.autoencoders import qwen_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.pipelines.flux import pack
from tests.tiny.text_encoders import qwen3_vl_text
from tests.tiny.tokenizers import qwen3_tokenizer
from tests.tiny.weights import randomised


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    layers = {"num_layers": 4, "num_text_layers": 3, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
    texts = {"text_hidden_dim": 16, "text_num_attention_heads": 2, "text_num_key_value_heads": 2}
    sizes = {"in_channels": 64, "timestep_embed_dim": 16, "text_intermediate_size": 16}
    return diffusers.Krea2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
        vae=qwen_autoencoder(),
        text_encoder=qwen3_vl_text(),
        tokenizer=qwen3_tokenizer(),
        transformer=randomised(tiny(diffusers.Krea2Transformer2DModel, **layers, **texts, **sizes)()),
        text_encoder_select_layers=(1, 2, 4),
    )


CASES = [
    Tiny(
        name="krea2",
        family="krea2",
        build=build,
        embedder="img_in",
        pack=pack,
        text=("encoder_hidden_states", "encoder_attention_mask"),
        positions="position_ids",
    )
]
