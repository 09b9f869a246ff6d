"""Stable Diffusion 3 and 3.5, with ControlNet and with skipped layers."""

from functools import partial

from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual

SIZES = {"sample_size": 8, "num_layers": 4, "attention_head_dim": 8}
build = tiny(SD3Transformer2DModel, **SIZES, joint_attention_dim=12, pooled_projection_dim=10)
# 3.5: normalised queries and keys; the first layers also attend to the image alone
medium = partial(build, dual_attention_layers=(0, 1), qk_norm="rms_norm")


def inputs(batch: int) -> dict:
    return usual(batch, (4, 8, 12), (7, 12), (200.0, 800.0)) | {"pooled_projections": random(3, batch, 10)}


def controlled(batch: int) -> dict:
    return inputs(batch) | {"block_controlnet_hidden_states": [random(4, batch, 24, 16), random(5, batch, 24, 16)]}


def skipping(batch: int) -> dict:
    return inputs(batch) | {"skip_layers": [1]}


# the image tokens come before the text in the joint attention
BLOCKS = (Blocks(name="transformer_blocks", returns=1, keys="first"),)
case = partial(Case, build=build, inputs=inputs, blocks=BLOCKS, tokens=24)
CASES = [
    case(name="sd3"),
    case(name="sd3.5", build=medium),
    case(name="sd3-controlnet", inputs=controlled),
    case(name="sd3.5-skip", build=medium, inputs=skipping),
]
