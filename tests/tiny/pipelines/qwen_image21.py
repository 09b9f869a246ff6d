"""Qwen-Image 2.1 of text. Keys and values of the prompt are not cached: training has no such calls."""

import importlib
from typing import Any

from torch import Tensor

from tests.tiny.autoencoders import qwen21_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import qwen3_vl_text, qwen_processor
from tests.tiny.tokenizers import CHAT
from tests.tiny.weights import randomised

TEMPLATE = CHAT.replace("message['content']", "message['content'][0]['text']")


def processor() -> Any:
    return qwen_processor("Qwen3VLProcessor", chat_template=TEMPLATE)


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 8, "out_channels": 8, "num_layers": 4, "context_in_dim": 16}
    return diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9),
        vae=qwen21_autoencoder(),
        text_encoder=qwen3_vl_text(whole=True),
        processor=processor(),
        transformer=randomised(tiny(diffusers.QwenImage21Transformer2DModel, **sizes)()),
    )


def pack(pipeline: Any, latents: Tensor) -> Tensor:
    return pipeline._pack_latents(latents, *latents.shape)


CASES = [
    Tiny(
        name="qwen_image21",
        family="qwen_image21",
        build=build,
        embedder="img_in",
        arguments=lambda pixels: {"use_kv_cache": False},
        pack=pack,
        decodes=False,  # into four channels
        one_prompt=True,
        one_length=True,
        reads_values="the tokens of the target are counted on the device",
    )
]
