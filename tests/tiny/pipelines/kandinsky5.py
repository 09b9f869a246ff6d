"""Kandinsky 5: text to image, image to image, text to video and image to video.

The image pipelines draw seven sizes of a megapixel; here one of 64 x 96 pixels. The stock attention rounds rotated
queries to bfloat16; here it does not (see `tests/tiny/stock/kandinsky5.py`).
"""

import importlib
import inspect
from functools import partial
from typing import Any

from diffusers.models.transformers.transformer_kandinsky import Kandinsky5AttnProcessor
from torch import Tensor

from tests.tiny.autoencoders import hunyuan_autoencoder, kl_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, to_image
from tests.tiny.stock.kandinsky5 import ExactProcessor
from tests.tiny.text_encoders import clip_text, qwen_processor, qwen_text
from tests.tiny.tokenizers import clip_tokenizer
from tests.tiny.weights import randomised

T2I, I2I, T2V, I2V = (f"Kandinsky5{kind}Pipeline" for kind in ("T2I", "I2I", "T2V", "I2V"))
stock: Any = Kandinsky5AttnProcessor
stock.__call__ = ExactProcessor.__call__


def small(cls: Any) -> None:
    """One size that the image pipeline draws."""
    made = cls.__init__

    def init(self: Any, *args: Any, **parts: Any) -> None:
        made(self, *args, **parts)
        self.resolutions = [(96, 64)]

    cls.__init__ = init
    cls.__init__.__signature__ = inspect.signature(made)


for name in (T2I, I2I):
    small(getattr(importlib.import_module("diffusers"), name))


def build(pipeline: str, *, channels: int = 4, **config: Any) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_visual_dim": channels, "out_visual_dim": channels, "in_text_dim": 16, "in_text_dim2": 16, "ff_dim": 64}
    make = tiny(diffusers.Kandinsky5Transformer3DModel, **sizes, num_visual_blocks=4, **config)
    image = pipeline in (T2I, I2I)
    vae = kl_autoencoder(channels=channels, scaling_factor=0.3611) if image else hunyuan_autoencoder()
    if pipeline in (I2I, I2V):  # these draw from the moments of what they are given
        last: Any = vae.quant_conv
        last.weight.data[channels:], last.bias.data[channels:] = 0, -30
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=vae,
        text_encoder=qwen_text(),
        tokenizer=qwen_processor(),
        text_encoder_2=clip_text(),
        tokenizer_2=clip_tokenizer(),
        transformer=randomised(make()),
    )


def pack(pipeline: Any, latents: Tensor) -> Tensor:
    video = latents if latents.ndim == 5 else latents[:, :, None]
    packed = video.permute(0, 2, 3, 4, 1)
    return pipeline.normalize_first_frame(packed) if hasattr(pipeline, "normalize_first_frame") else packed


def first_frame(pixels: Tensor) -> dict[str, Any]:
    return {"image": to_image(pixels)}


kandinsky = partial(
    Tiny,
    embedder="visual_transformer_blocks.0.self_attention_norm",
    pack=pack,
    one_prompt=True,
    one_length=True,
    channels_last=True,
    waits=("self.freqs.to(device=time.device)",),
)
video = partial(kandinsky, family="kandinsky5_video")
CASES = [
    kandinsky(name="kandinsky5_image", family="kandinsky5_image", build=partial(build, T2I, channels=16)),
    kandinsky(
        name="kandinsky5_image-edit",
        family="kandinsky5_image",
        build=partial(build, I2I, channels=16, visual_cond=True),
        arguments=first_frame,
        reference=True,
        appended=False,
        truncates=False,
    ),
    video(name="kandinsky5_video", build=partial(build, T2V, visual_cond=True), frames=5),
    video(
        name="kandinsky5_video-i2v-first",
        build=partial(build, I2V, visual_cond=True),
        frames=21,
        size=(32, 48),
        arguments=first_frame,
        decodes=False,
    ),
]
