"""Qwen-Image, Edit with one reference, Edit-Plus with two, and with references at time 0 (2511).

Edit scales its references to a megapixel; here to 64 x 96 pixels, by what it asks for the size.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from torch import Tensor

from tests.tiny.autoencoders import qwen_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, to_image
from tests.tiny.text_encoders import qwen_processor, qwen_text
from tests.tiny.tokenizers import qwen_tokenizer
from tests.tiny.weights import randomised

AREA = 64 * 96
"""Pixels of a tiny megapixel."""


def smaller(calculate: Callable[..., Any]) -> Callable[..., Any]:
    return lambda area, ratio: calculate(area * AREA // 1024**2, ratio)


MODULES: tuple[Any, ...] = (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus)
for module in MODULES:
    module.calculate_dimensions = smaller(module.calculate_dimensions)


def build(pipeline: str = "QwenImagePipeline", **config: Any) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    make = tiny(diffusers.QwenImageTransformer2DModel, in_channels=64, out_channels=16, num_layers=4, **config)
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=qwen_autoencoder(),
        text_encoder=qwen_text(),
        tokenizer=qwen_tokenizer(),
        transformer=randomised(make()),
        **({} if pipeline == "QwenImagePipeline" else {"processor": qwen_processor()}),
    )


def pack(pipeline: Any, latents: Tensor) -> Tensor:
    return pipeline._pack_latents(latents, *latents.shape)


def join(pixels: Tensor) -> dict[str, Any]:
    return {"image": [to_image(pixels), to_image(pixels.flip(-1))]}


EDIT, PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
TEXT, ZERO = "torch.as_tensor(text_seq_len", "modulate_index = torch.tensor("
qwen = partial(Tiny, family="qwen_image", embedder="img_in", pack=pack, waits=(TEXT,))
edit = partial(qwen, reference=True, one_prompt=True)
CASES = [
    # a call reads 512 tokens unless told, `encode_prompt` and the family 1024
    qwen(name="qwen_image", build=build, arguments=lambda pixels: {"max_sequence_length": 1024}),
    edit(name="qwen_image-edit", build=partial(build, EDIT), arguments=lambda pixels: {"image": to_image(pixels)}),
    edit(
        name="qwen_image-edit-2511",
        build=partial(build, PLUS, zero_cond_t=True),
        references=2,
        arguments=join,
        waits=(TEXT, ZERO),
    ),
]
