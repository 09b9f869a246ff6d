"""FLUX.1 with an AutoencoderTiny, with an AutoencoderKL, without guidance (schnell), and Kontext."""

import importlib
from functools import partial
from typing import Any

from PIL import Image
from torch import Tensor

from tests.tiny.autoencoders import kl_autoencoder, tiny_autoencoder
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import clip_text, t5_text
from tests.tiny.tokenizers import clip_tokenizer, t5_tokenizer
from tests.tiny.weights import randomised


def build(pipeline: str = "FluxPipeline", *, kl: bool = False, guided: bool = True) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=guided,
    )
    vae = (
        kl_autoencoder(channels=16, scaling_factor=0.3611, shift_factor=0.1159) if kl else tiny_autoencoder(channels=16)
    )
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=guided),
        vae=vae,
        text_encoder=clip_text(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_text(),
        tokenizer_2=t5_tokenizer(),
        transformer=randomised(transformer),
    )


def pack(pipeline: Any, latents: Tensor) -> Tensor:
    return pipeline._pack_latents(latents, *latents.shape)


def edit(pixels: Tensor) -> dict[str, Any]:
    """Kontext's source image, and the two arguments that keep it and the target at their sizes."""
    image = (pixels[0, :, 0].permute(1, 2, 0) * 127.5 + 127.5).round().byte().numpy()
    return {"image": Image.fromarray(image), "max_area": pixels.shape[-2] * pixels.shape[-1], "_auto_resize": False}


flux = partial(Tiny, family="flux", embedder="x_embedder", pack=pack)
CASES = [
    flux(name="flux", build=build),
    flux(name="flux-kl", build=partial(build, kl=True)),
    flux(name="flux-schnell", build=partial(build, guided=False)),
    flux(name="flux-kontext", build=partial(build, "FluxKontextPipeline"), arguments=edit, reference=True),
]
