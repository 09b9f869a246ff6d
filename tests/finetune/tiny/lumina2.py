"""Lumina-Image 2.0 with the real taef1; T5's tokenizer stands in for Gemma's."""

import importlib
from typing import Any

from .parts import Tiny, randomised, t5_tokenizer, tiny_autoencoder


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")

    transformer = diffusers.Lumina2Transformer2DModel(
        in_channels=16,
        hidden_size=32,
        num_layers=4,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(256, 16, 16),
        cap_feat_dim=16,
    )
    return diffusers.Lumina2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=tiny_autoencoder("taef1"),
        text_encoder=gemma_text(),
        tokenizer=t5_tokenizer(),
        transformer=randomised(transformer),
    )


def gemma_text() -> Any:
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=32128,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        pad_token_id=0,
    )
    return randomised(Gemma2Model(config))


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
