"""HunyuanVideo 1.0 of text, and of a first frame in its two forms: channels of their own, or the first latent frame."""

import importlib
from functools import partial
from typing import Any

from torch import Tensor

from tests.tiny.autoencoders import hunyuan_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, first_frame
from tests.tiny.text_encoders import clip_text, llama_text, llava
from tests.tiny.tokenizers import clip_tokenizer, llama_tokenizer
from tests.tiny.weights import randomised


def build(given: str | None = None) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes: dict[str, Any] = {"out_channels": 4, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1}
    sizes |= {"in_channels": 9 if given == "latent_concat" else 4, "image_condition_type": given}
    texts = {"text_embed_dim": 16, "pooled_projection_dim": 16, "guidance_embeds": given != "latent_concat"}
    transformer = tiny(diffusers.HunyuanVideoTransformer3DModel, **sizes, **texts)()
    language = llava() if given else {"text_encoder": llama_text(), "tokenizer": llama_tokenizer()}
    pipeline = diffusers.HunyuanVideoImageToVideoPipeline if given else diffusers.HunyuanVideoPipeline
    return pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=hunyuan_autoencoder(),
        text_encoder_2=clip_text(),
        tokenizer_2=clip_tokenizer(),
        transformer=randomised(transformer),
        **language,
    )


def after(pipeline: Any, latents: Tensor) -> Tensor:
    return latents[:, :, 1:]


hunyuan = partial(
    Tiny,
    family="hunyuanvideo1",
    embedder="x_embedder",
    frames=5,
    text=("encoder_hidden_states", "encoder_attention_mask"),
)
of_a_frame = partial(hunyuan, arguments=first_frame, one_prompt=True)
CASES = [
    hunyuan(name="hunyuanvideo1", build=build),
    of_a_frame(
        name="hunyuanvideo1-i2v",
        build=partial(build, "latent_concat"),
        begins=lambda noise, batch: 0.999 * noise + 0.001 * batch["condition"],
        pack=after,
        decodes=False,  # the frames of the first latent frame are left out
    ),
    of_a_frame(
        name="hunyuanvideo1-i2v-first",
        build=partial(build, "token_replace"),
        begins=lambda noise, batch: 0.999 * noise + 0.001 * batch["mean"][:, :, :1],
        pinned=True,
        decodes=False,  # the first latent frame is not that of the clip
    ),
]
