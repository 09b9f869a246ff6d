"""Wan 2.1, A14B with two experts, each of text and of a first frame, 2.1 of a last frame too, and TI2V of both."""

import importlib
from functools import partial
from typing import Any

from torch import Tensor

from tests.tiny.autoencoders import WAN_NEW_CHANNELS, wan_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, first_frame
from tests.tiny.text_encoders import clip_vision, t5_text
from tests.tiny.tokenizers import t5_tokenizer
from tests.tiny.weights import randomised

I2V = "WanImageToVideoPipeline"
CLIP_TOKENS = 5


def both_frames(pixels: Tensor) -> dict[str, Any]:
    return first_frame(pixels) | {"last_image": first_frame(pixels[:, :, -1:])["image"]}


def build(
    pipeline: str = "WanPipeline",
    *,
    new: bool = False,
    image: bool = False,
    clip: bool = False,
    last: bool = False,
    **config: Any,
) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

    # the second cannot clean a prompt where ftfy is not installed, the first can
    pipeline_wan_i2v.basic_clean = pipeline_wan.basic_clean

    channels = WAN_NEW_CHANNELS if new else 16
    sizes = {"in_channels": 36 if image else channels, "out_channels": channels, "num_layers": 4}
    embeds: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": 24} if clip else {}
    embeds |= {"pos_embed_seq_len": 2 * CLIP_TOKENS} if last else {}
    make = tiny(diffusers.WanTransformer3DModel, **sizes, **embeds, attention_head_dim=12, rope_max_seq_len=32)
    experts = ("transformer", "transformer_2") if "boundary_ratio" in config else ("transformer",)
    transformers = {part: randomised(make(), seed) for seed, part in enumerate(experts)}
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=wan_autoencoder(new=new),
        text_encoder=t5_text(multilingual=True),
        tokenizer=t5_tokenizer(),
        **transformers,
        **(clip_vision() if clip else {}),
        **config,
    )


wan = partial(Tiny, family="wan", embedder="patch_embedding", frames=5)
CASES = [
    wan(name="wan", build=build),
    wan(name="wan-image", build=build, frames=1),
    wan(name="wan-a14b", build=partial(build, boundary_ratio=0.875)),
    wan(name="wan-i2v", build=partial(build, I2V, image=True, clip=True), arguments=first_frame),
    wan(name="wan-flf2v", build=partial(build, I2V, image=True, clip=True, last=True), arguments=both_frames),
    wan(name="wan-i2v-a14b", build=partial(build, I2V, image=True, boundary_ratio=0.9), arguments=first_frame),
    wan(name="wan-ti2v", build=partial(build, new=True, expand_timesteps=True), frames=9, one_time=True),
    wan(
        name="wan-ti2v-first",
        build=partial(build, I2V, new=True, expand_timesteps=True),
        frames=9,
        arguments=first_frame,
    ),
]
