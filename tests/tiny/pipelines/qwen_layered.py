"""Qwen-Image-Layered with two layers. The stock pipeline draws 640 pixels, here 64 x 96, and cannot return latents."""

import importlib
from functools import wraps
from typing import Any

from diffusers.pipelines.qwenimage import pipeline_qwenimage_layered
from torch import Tensor

from tests.tiny.autoencoders import qwen_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, to_image
from tests.tiny.pipelines.qwen_image import AREA, TEXT
from tests.tiny.text_encoders import qwen_processor, qwen_text
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.weights import randomised

LAYERS = 2
module: Any = pipeline_qwenimage_layered
stock, calculate = module.QwenImageLayeredPipeline.__call__, module.calculate_dimensions


@wraps(stock)
def call(self: Any, *args: Any, output_type: str = "pil", **named: Any) -> Any:
    """The stock call; for latents, those after its last step."""
    if output_type != "latent":
        return stock(self, *args, output_type=output_type, **named)
    kept: list[Tensor] = []

    def keep(pipeline: Any, step: int, time: Tensor, found: dict[str, Any]) -> dict[str, Any]:
        kept.append(found["latents"])
        return found

    stock(self, *args, output_type="pt", callback_on_step_end=keep, **named)
    return (kept[-1],)


module.QwenImageLayeredPipeline.__call__ = call
module.calculate_dimensions = lambda area, ratio: calculate(area * AREA // 640**2, ratio)


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    config = {"in_channels": 64, "out_channels": 16, "num_layers": 4}
    make = tiny(diffusers.QwenImageTransformer2DModel, **config, use_additional_t_cond=True, use_layer3d_rope=True)
    return diffusers.QwenImageLayeredPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=qwen_autoencoder(input_channels=4),
        text_encoder=qwen_text(),
        tokenizer=qwen_tokenizer(),
        processor=qwen_processor(),
        transformer=randomised(make()),
    )


def pack(pipeline: Any, latents: Tensor) -> Tensor:
    count, channels, frames, rows, columns = latents.shape
    return pipeline._pack_latents(latents.transpose(1, 2).contiguous(), count, channels, rows, columns, frames)


def taken_apart(pixels: Tensor) -> dict[str, Any]:
    more = {"layers": LAYERS, "max_sequence_length": 1024}
    return {"image": to_image(pixels).convert("RGBA"), "resolution": 640, **more}


CASES = [
    Tiny(
        name="qwen_layered",
        family="qwen_layered",
        build=build,
        embedder="img_in",
        arguments=taken_apart,
        pack=pack,
        reference=True,
        references=LAYERS,
        condition=1 / (1 + LAYERS),
        frames_first=True,
        decodes=False,  # into layers alone
        waits=(TEXT,),
    )
]
