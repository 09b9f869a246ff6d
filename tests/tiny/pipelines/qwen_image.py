"""Qwen-Image."""

import importlib
from typing import Any

from torch import Tensor

from tests.tiny.autoencoders import qwen_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import qwen_text
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.weights import randomised


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    transformer = tiny(diffusers.QwenImageTransformer2DModel, in_channels=64, out_channels=16, num_layers=4)()
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=qwen_autoencoder(),
        text_encoder=qwen_text(),
        tokenizer=qwen_tokenizer(),
        transformer=randomised(transformer),
    )


def pack(pipeline: Any, latents: Tensor) -> Tensor:
    return pipeline._pack_latents(latents, *latents.shape)


CASES = [
    Tiny(
        name="qwen_image",
        family="qwen_image",
        build=build,
        embedder="img_in",
        pack=pack,
        # a call reads 512 tokens unless told, `encode_prompt` and the family 1024
        arguments=lambda pixels: {"max_sequence_length": 1024},
        waits=("torch.as_tensor(text_seq_len",),
    )
]
