"""PRX, with FLUX's autoencoder and with DC-AE's."""

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.tiny.autoencoders import dc_autoencoder, kl_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny
from tests.tiny.text_encoders import t5_gemma_text
from tests.tiny.tokenizers import gemma_tokenizer
from tests.tiny.weights import randomised


def fix_text_without_ftfy() -> None:
    """Its pipeline cannot clean a prompt where ftfy is not installed; the prompts here need no fixing."""
    from diffusers.pipelines.prx import pipeline_prx

    if not hasattr(pipeline_prx, "ftfy"):
        pipeline_prx.__dict__["ftfy"] = SimpleNamespace(fix_text=lambda text: text)


def build(*, dc: bool = False) -> Any:
    fix_text_without_ftfy()
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 8 if dc else 16, "patch_size": 1 if dc else 2, "context_in_dim": 16, "hidden_size": 32}
    make = tiny(diffusers.PRXTransformer2DModel, **sizes, depth=4, mlp_ratio=2, axes_dim=[8, 8])
    tokenizer = gemma_tokenizer()
    tokenizer.model_max_length = 256
    return diffusers.PRXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=dc_autoencoder() if dc else kl_autoencoder(channels=16, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=t5_gemma_text(),
        tokenizer=tokenizer,
        transformer=randomised(make()),
    )


prx = partial(
    Tiny,
    family="prx",
    embedder="img_in",
    arguments=lambda pixels: {"use_resolution_binning": False},
    text=("encoder_hidden_states", "attention_mask"),
)
CASES = [prx(name="prx", build=build), prx(name="prx-dc", build=partial(build, dc=True), size=(128, 192))]
