"""Cosmos Predict 2: text to image and video to world. No padding mask: the stock model would need torchvision."""

import importlib
from functools import partial
from typing import Any

from tests.tiny.autoencoders import almost_certain, wan_autoencoder
from tests.tiny.case import tiny
from tests.tiny.guardrail import Guardrail
from tests.tiny.pipelines.case import Tiny, first_frame
from tests.tiny.text_encoders import t5_text
from tests.tiny.tokenizers import t5_tokenizer
from tests.tiny.weights import randomised


def build(pipeline: str, *, video: bool) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 17 if video else 16, "out_channels": 16, "num_layers": 4, "adaln_lora_dim": 8}
    texts = {"text_embed_dim": 16, "max_size": (8, 16, 16), "patch_size": (1, 2, 2), "extra_pos_embed_type": None}
    transformer = tiny(diffusers.CosmosTransformer3DModel, **sizes, **texts, concat_padding_mask=False)()
    vae = wan_autoencoder()
    almost_certain(vae.quant_conv, 16)
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        vae=vae,
        text_encoder=t5_text(),
        tokenizer=t5_tokenizer(),
        transformer=randomised(transformer),
        safety_checker=Guardrail(),
    )


cosmos = partial(Tiny, embedder="transformer_blocks.0.norm1.norm", edm=True)
CASES = [
    cosmos(
        name="cosmos",
        family="cosmos",
        build=partial(build, "Cosmos2TextToImagePipeline", video=False),
        stepped=lambda pipeline, latents: latents[:, :, None],
    ),
    cosmos(
        name="cosmos-first",
        family="cosmos_video",
        build=partial(build, "Cosmos2VideoToWorldPipeline", video=True),
        frames=5,
        arguments=first_frame,
        drawn_before=lambda shape: (1, *shape[1:]),
    ),
]
