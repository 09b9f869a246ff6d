"""HiDream-I1."""

import importlib
from typing import Any

from tests.tiny.autoencoders import kl_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import clip_text, llama3_text, t5_text
from tests.tiny.tokenizers import clip_tokenizer, llama3_tokenizer, t5_tokenizer
from tests.tiny.weights import randomised


def build() -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"patch_size": 2, "in_channels": 16, "out_channels": 16, "num_layers": 2, "num_single_layers": 3}
    texts = {"caption_channels": [20, 16], "text_emb_dim": 32, "llama_layers": [0, 1, 2, 2, 1]}
    # of as many experts as are active, each has gradients whatever tokens are dropped
    experts = {"num_routed_experts": 2, "num_activated_experts": 2, "max_resolution": (16, 16)}
    transformer = tiny(diffusers.HiDreamImageTransformer2DModel, **sizes, **texts, **experts)()
    long = {"projection": True, "positions": 248}
    return diffusers.HiDreamImagePipeline(
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=kl_autoencoder(channels=16, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=clip_text(**long),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text(**long, seed=1),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_text(hidden=20),
        tokenizer_3=t5_tokenizer(),
        text_encoder_4=llama3_text(),
        tokenizer_4=llama3_tokenizer(),
        transformer=randomised(transformer),
    )


def small(pipeline: Any) -> None:
    """It draws all images at the area of a square of so many latents: here that of 64 x 96 pixels."""
    pipeline.default_sample_size = 9.8


CASES = [
    Tiny(
        name="hidream",
        family="hidream",
        build=build,
        embedder="x_embedder",
        prepare=small,
        waits=("img_sizes = torch.tensor([patch_height, patch_width]",),
    )
]
