"""SkyReels-V2: T2V, I2V and diffusion forcing, with and without causal blocks of frames."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_skyreels_v2 import SkyReelsV2Transformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual

build = tiny(SkyReelsV2Transformer3DModel, attention_head_dim=12)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 4, 4, 6), (7, 16), (800, 300)) | {"fps": [0, 1][:batch]}  # 4 frames of 2 x 3 tokens


def i2v(batch: int) -> dict:
    return inputs(batch) | {
        "encoder_hidden_states": random(2, batch, 512, 16),
        "encoder_hidden_states_image": random(3, batch, 5, 16),
    }


def forcing(batch: int) -> dict:
    """A timestep per frame."""
    timestep = torch.tensor([[0, 200, 500, 900], [100, 300, 300, 700]])[:batch]
    return inputs(batch) | {"timestep": timestep, "enable_diffusion_forcing": True}


with_fps, with_image = partial(build, inject_sample_info=True), partial(build, image_dim=16, added_kv_proj_dim=24)
case = partial(Case, build=build, blocks=(Blocks(name="blocks"),), tokens=24)
CASES = [
    case(name="skyreels-v2", build=with_fps, inputs=inputs),
    case(name="skyreels-v2-i2v", build=with_image, inputs=i2v),
    case(name="skyreels-v2-forcing", inputs=forcing),
    case(name="skyreels-v2-causal", build=partial(build, num_frame_per_block=2), inputs=forcing),
]
