"""Lumina-Image 2.0."""

import importlib
from typing import Any

from tests.tiny.autoencoders import tiny_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import gemma_text
from tests.tiny.tokenizers import gemma_tokenizer
from tests.tiny.weights import randomised


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 16, "num_layers": 4, "num_attention_heads": 4, "multiple_of": 16, "cap_feat_dim": 16}
    rotations = {"axes_dim_rope": (4, 2, 2), "axes_lens": (300, 16, 16)}
    transformer = tiny(diffusers.Lumina2Transformer2DModel, **sizes, **rotations)()
    return diffusers.Lumina2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=tiny_autoencoder(channels=16),
        text_encoder=gemma_text(),
        tokenizer=gemma_tokenizer(),
        transformer=randomised(transformer),
    )


CASES = [
    Tiny(
        name="lumina2",
        family="lumina2",
        build=build,
        embedder="x_embedder",
        # the pipeline leaves its system prompt out of what guidance leads away from; a caption has it unless empty
        negative="",
        text=("encoder_hidden_states", "encoder_attention_mask"),
        waits=("attention_mask.sum(dim=1).tolist()", "self.freqs_cis[i].to(ids.device)"),
    )
]
