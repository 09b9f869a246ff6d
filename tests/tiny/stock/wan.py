"""Wan 2.1 and 2.2, VACE, Animate and ChronoEdit."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_chronoedit import ChronoEditTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan_animate import WanAnimateTransformer3DModel
from diffusers.models.transformers.transformer_wan_vace import WanVACETransformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual

TEXT = 7
# layers that attend to image embeddings take the last 512 tokens of their context for the text, whatever its length
IMAGE = {"attention_head_dim": 12, "image_dim": 16, "added_kv_proj_dim": 24}
build = tiny(WanTransformer3DModel, attention_head_dim=12)
build_i2v = partial(build, in_channels=9, **IMAGE)
build_vace = tiny(
    WanVACETransformer3DModel, attention_head_dim=12, vace_in_channels=6, num_layers=4, vace_layers=[0, 1, 3]
)
build_chronoedit = tiny(ChronoEditTransformer3DModel, **IMAGE, in_channels=9, rope_temporal_skip_len=8)
MOTION = {"motion_encoder_size": 8, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 8}
FACE = {"face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2}
build_animate = tiny(
    WanAnimateTransformer3DModel,
    in_channels=12,
    latent_channels=4,
    num_layers=4,
    motion_encoder_channel_sizes={"4": 4, "8": 4},
    **IMAGE | MOTION | FACE,
)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 3, 4, 6), (TEXT, 16), (800.0, 300.0))  # 3 frames of 2 x 3 tokens


def i2v(batch: int) -> dict:
    return inputs(batch) | {
        "hidden_states": random(1, batch, 9, 3, 4, 6),
        "encoder_hidden_states": random(2, batch, 512, 16),
        "encoder_hidden_states_image": random(3, batch, 5, 16),
    }


def ti2v(batch: int) -> dict:
    """Every token has its own timestep."""
    return inputs(batch) | {"timestep": inputs(batch)["timestep"][:, None] * torch.linspace(0, 1, 18)}


def vace(batch: int) -> dict:
    return inputs(batch) | {
        "control_hidden_states": random(3, batch, 6, 3, 4, 6),
        "control_hidden_states_scale": torch.tensor([1.0, 0.5, 2.0]),
    }


def animate(batch: int) -> dict:
    """The first frame is the character; 5 frames of the face become 2, as many as the frames after it."""
    return i2v(batch) | {
        "hidden_states": random(1, batch, 12, 3, 4, 6),
        "pose_hidden_states": random(4, batch, 4, 2, 4, 6),
        "face_pixel_values": random(5, batch, 3, 5, 8, 8),
    }


def chronoedit(batch: int) -> dict:
    """Two frames, input and edit, stand apart in time."""
    return i2v(batch) | {"hidden_states": random(1, batch, 9, 2, 4, 6)}


DEFECTS = {"compile": "the stock face encoder's backward fails under torch.compile, dense too."}
case = partial(Case, build=build, blocks=(Blocks(name="blocks"),), tokens=18)
animated = partial(case, build=build_animate, references=6, references_at="first", defects=DEFECTS)
CASES = [
    case(name="wan", inputs=inputs),
    case(name="wan-i2v", build=build_i2v, inputs=i2v),
    case(name="wan-ti2v", inputs=ti2v),
    case(name="wan-vace", build=build_vace, inputs=vace),
    animated(name="wan-animate", inputs=animate),
    case(name="chronoedit", build=build_chronoedit, inputs=chronoedit, tokens=12),
]
