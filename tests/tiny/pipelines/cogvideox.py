"""CogVideoX 2b (sine positions), 5b-I2V (rotations and learned positions) and 1.5 of a first frame."""

import importlib
from functools import partial
from typing import Any

from torch import Tensor

from tests.tiny.autoencoders import cogvideox_autoencoder
from tests.tiny.case import tiny
from tests.tiny.pipelines.case import Tiny, first_frame
from tests.tiny.text_encoders import t5_text
from tests.tiny.tokenizers import t5_tokenizer
from tests.tiny.weights import randomised

TEXT = 32
I2V = "CogVideoXImageToVideoPipeline"


def build(pipeline: str = "CogVideoXPipeline", *, late: bool = False, **config: Any) -> Any:
    diffusers: Any = importlib.import_module("diffusers")
    image = pipeline == I2V
    sizes = {"in_channels": 8 if image else 4, "out_channels": 4, "num_layers": 4, "text_embed_dim": 16}
    positions = {"sample_width": 12, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": TEXT}
    config = positions | config
    config |= {"patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 16 if image else None} if late else {}
    transformer = tiny(diffusers.CogVideoXTransformer3DModel, **sizes, **config)()
    return getattr(diffusers, pipeline)(
        scheduler=diffusers.CogVideoXDDIMScheduler(
            prediction_type="v_prediction",
            snr_shift_scale=1.0 if late else 3.0,
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            clip_sample=False,
        ),
        vae=cogvideox_autoencoder(scaling_factor=0.7, invert_scale_latents=late),
        text_encoder=t5_text(),
        tokenizer=t5_tokenizer(),
        transformer=randomised(transformer, scale=1.0),
    )


def arguments(pixels: Tensor) -> dict[str, Any]:
    return {"max_sequence_length": TEXT}


def with_image(pixels: Tensor) -> dict[str, Any]:
    return arguments(pixels) | first_frame(pixels)


cog = partial(
    Tiny,
    family="cogvideox",
    embedder="patch_embed",
    text_before=TEXT,
    frames=9,
    frames_first=True,
    arguments=arguments,
    pack=lambda pipeline, latents: latents.transpose(1, 2),
)
image = partial(
    cog, arguments=with_image, image_per_prompt=True, drawn_before=lambda shape: (1, shape[1], 1, *shape[3:])
)
rotated = partial(build, use_rotary_positional_embeddings=True)
CASES = [
    cog(name="cogvideox", build=build),
    image(
        name="cogvideox-i2v",
        build=partial(rotated, I2V, use_learned_positional_embeddings=True, sample_width=8),
        size=(64, 64),
    ),
    image(name="cogvideox-1.5-i2v", build=partial(rotated, I2V, late=True), frames=13),
]
