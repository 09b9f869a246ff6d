"""EasyAnimate: layers with their own text weights, then layers without; inpainting and control latents; two texts."""

from functools import partial

from diffusers.models.transformers.transformer_easyanimate import EasyAnimateTransformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual

SIZES = {"in_channels": 4, "out_channels": 4, "patch_size": 2, "mmdit_layers": 2, "time_embed_dim": 8}
build = tiny(EasyAnimateTransformer3DModel, **SIZES)
inpainting = partial(build, in_channels=11, add_norm_text_encoder=True, text_embed_dim_t5=12, after_norm=True)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 3, 4, 6), (5, 12), (200.0, 800.0))


def inpainting_inputs(batch: int) -> dict:
    return inputs(batch) | {
        "encoder_hidden_states_t5": random(3, batch, 4, 12),
        "inpaint_latents": random(4, batch, 5, 3, 4, 6),
        "control_latents": random(5, batch, 2, 3, 4, 6),
    }


case = partial(Case, blocks=(Blocks(name="transformer_blocks", returns=0),), tokens=18)
CASES = [
    case(name="easyanimate", build=build, inputs=inputs),
    case(name="easyanimate-inpainting", build=inpainting, inputs=inpainting_inputs),
]
