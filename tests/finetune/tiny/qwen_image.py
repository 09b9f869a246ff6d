"""Qwen-Image; CLIP's tokenizer stands in for Qwen's, byte pairs as well."""

import importlib
from typing import Any

import torch
from torch import Tensor

from .parts import Tiny, clip_tokenizer, randomised


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")

    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=vae,
        text_encoder=qwen_text(),
        tokenizer=clip_tokenizer(),
        transformer=randomised(transformer),
    )


def qwen_text() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 49408,
        "bos_token_id": 49406,
        "eos_token_id": 49407,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
        "tie_word_embeddings": True,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    return randomised(Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)))


def pack(pipeline: Any, latents: Tensor) -> Tensor:
    return pipeline._pack_latents(latents, *latents.shape)


CASES = [
    Tiny(
        name="qwen_image",
        family="qwen_image",
        build=build,
        embedder="img_in",
        pack=pack,
        waits=("torch.as_tensor(text_seq_len",),
    )
]
