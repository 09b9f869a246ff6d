"""FLUX.2 dev from text alone, and klein with two reference images."""

import importlib
from functools import partial
from typing import Any

from torch import Tensor

from tests.tiny.autoencoders import flux2_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, to_image
from tests.tiny.text_encoders import mistral_text, qwen3_text
from tests.tiny.tokenizers import mistral_tokenizer, qwen3_tokenizer
from tests.tiny.weights import randomised


def build(*, klein: bool = False, **config: Any) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 128, "num_layers": 2, "num_single_layers": 3, "axes_dims_rope": (4, 4, 4, 4)}
    texts = {"joint_attention_dim": 24, "timestep_guidance_channels": 16, "guidance_embeds": not klein}
    parts = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": flux2_autoencoder(),
        "transformer": randomised(tiny(diffusers.Flux2Transformer2DModel, **sizes, **texts)()),
    }
    if klein:
        return diffusers.Flux2KleinPipeline(text_encoder=qwen3_text(), tokenizer=qwen3_tokenizer(), **parts, **config)
    # PixtralProcessor needs torchvision; a tokenizer with its template answers the one call that the pipeline makes
    return diffusers.Flux2Pipeline(text_encoder=mistral_text(), tokenizer=mistral_tokenizer(), **parts)


def pack(pipeline: Any, latents: Tensor) -> Tensor:
    return pipeline._pack_latents(latents)


def unpack(pipeline: Any, latents: Tensor) -> Tensor:
    """Klein returns what its autoencoder decodes, even if it is not decoded."""
    statistics = pipeline.vae.bn
    scale = (statistics.running_var + pipeline.vae.config.batch_norm_eps).sqrt().view(-1, 1, 1)
    return pipeline._unpatchify_latents(latents * scale + statistics.running_mean.view(-1, 1, 1))


def edit(pixels: Tensor) -> dict[str, Any]:
    return {"image": [to_image(pixels), to_image(pixels.flip(-1))]}


# klein always leads away from the empty prompt, dev from none
flux2 = partial(Tiny, family="flux2", embedder="x_embedder", pack=pack, negative="")
CASES = [
    flux2(name="flux2", build=build),
    flux2(
        name="flux2-klein",
        build=partial(build, klein=True),
        pack=unpack,
        stepped=pack,
        arguments=edit,
        reference=True,
        references=2,
    ),
]
