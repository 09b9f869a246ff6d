"""LTX-Video: of text, of a first frame, and the pipeline of 0.9.5 and later, which counts frames from the first."""

import importlib
from functools import partial
from typing import Any

from torch import Tensor

from tests.tiny.autoencoders import ltx_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, first_frame
from tests.tiny.text_encoders import t5_text
from tests.tiny.tokenizers import t5_tokenizer
from tests.tiny.weights import randomised


def build(pipeline: str = "LTXPipeline") -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    sizes = {"in_channels": 8, "out_channels": 8, "num_layers": 4, "attention_head_dim": 12, "cross_attention_dim": 24}
    transformer = tiny(diffusers.LTXVideoTransformer3DModel, **sizes, caption_channels=16)()
    late = pipeline == "LTXConditionPipeline"
    shifts = {"base_shift": 0.95, "max_shift": 2.05, "base_image_seq_len": 1024, "shift_terminal": 0.1}
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**({} if late else shifts), use_dynamic_shifting=not late),
        vae=ltx_autoencoder(),
        text_encoder=t5_text(),
        tokenizer=t5_tokenizer(),
        transformer=randomised(transformer, scale=1.4 if late else 1.0),
    )


def pack(pipeline: Any, latents: Tensor) -> Tensor:
    return pipeline._pack_latents(latents)


ltx = partial(
    Tiny,
    family="ltxvideo",
    embedder="proj_in",
    frames=9,
    size=(128, 128),
    pack=pack,
    text=("encoder_hidden_states", "encoder_attention_mask"),
)
CASES = [
    ltx(name="ltxvideo", build=build),
    ltx(
        name="ltxvideo-first",
        build=partial(build, "LTXImageToVideoPipeline"),
        arguments=first_frame,
        drawn_before=lambda shape: (1, shape[1], 1, *shape[3:]),
        stepped=lambda pipeline, latents: latents[:, :, 1:],
    ),
    ltx(
        name="ltxvideo-condition",
        build=partial(build, "LTXConditionPipeline"),
        pack=lambda pipeline, latents: latents,
        stepped=pack,
        one_time=True,
    ),
]
