"""FLUX.1 with an AutoencoderTiny, with an AutoencoderKL, without guidance (schnell), and Kontext."""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.tiny.autoencoders import kl_autoencoder, real_autoencoder, tiny_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, to_image
from tests.tiny.text_encoders import clip_text, t5_text
from tests.tiny.tokenizers import clip_tokenizer, real_tokenizers, t5_tokenizer
from tests.tiny.weights import randomised


def build(pipeline: str = "FluxPipeline", *, kl: bool = False, guided: bool = True, real: Path | None = None) -> Any:
    """With the real tokenizers and the real taef1 where `real` is the folder of real data."""
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 64, "num_layers": 2, "num_single_layers": 3, "pooled_projection_dim": 16}
    transformer = tiny(diffusers.FluxTransformer2DModel, **sizes, guidance_embeds=guided)()
    make_vae = partial(kl_autoencoder, scaling_factor=0.3611, shift_factor=0.1159) if kl else tiny_autoencoder
    clip, t5 = real_tokenizers(real / "tokenizers") if real else (clip_tokenizer(), t5_tokenizer())
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=guided),
        vae=real_autoencoder(real / "taesd", "taef1") if real else make_vae(channels=16),
        text_encoder=clip_text(tokenizer=clip),
        tokenizer=clip,
        text_encoder_2=t5_text(tokenizer=t5),
        tokenizer_2=t5,
        transformer=randomised(transformer),
    )


def pack(pipeline: Any, latents: Tensor) -> Tensor:
    return pipeline._pack_latents(latents, *latents.shape)


def edit(pixels: Tensor) -> dict[str, Any]:
    """Kontext's source image, and the two arguments that keep it and the target at their sizes."""
    return {"image": to_image(pixels), "max_area": pixels.shape[-2] * pixels.shape[-1], "_auto_resize": False}


flux = partial(Tiny, family="flux", embedder="x_embedder", pack=pack)
CASES = [
    flux(name="flux", build=build),
    flux(name="flux-kl", build=partial(build, kl=True)),
    flux(name="flux-schnell", build=partial(build, guided=False)),
    flux(name="flux-kontext", build=partial(build, "FluxKontextPipeline"), arguments=edit, reference=True),
]
