"""Stable Audio 3: memory tokens, differential attention, patches, and the inpainting condition."""

from functools import partial

from diffusers.models.transformers.transformer_stable_audio3 import StableAudio3DiTModel

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

TEXT = 5
SIZES = {"io_channels": 4, "embed_dim": 32, "ff_mult": 2.0, "num_memory_tokens": 3, "timestep_features_dim": 8}
build = tiny(StableAudio3DiTModel, **SIZES, cond_token_dim=12, global_cond_dim=8, local_add_cond_dim=5)
patched = partial(build, patch_size=2, use_differential_attention=False)


def inputs(batch: int) -> dict:
    more = {"global_hidden_states": random(3, batch, 8), "encoder_attention_mask": valid(batch, TEXT, 3, 5)}
    return usual(batch, (4, 18), (TEXT, 12)) | more


def inpainting(batch: int) -> dict:
    return inputs(batch) | {"local_add_cond": random(4, batch, 5, 18)}


def longer(batch: int) -> dict:
    return inputs(batch) | {"hidden_states": random(1, batch, 4, 32)}


case = partial(Case, build=build, blocks=(Blocks(name="transformer_blocks"),), tokens=18)
CASES = [
    case(name="stable-audio3", inputs=inputs),
    case(name="stable-audio3-inpainting", inputs=inpainting),
    case(name="stable-audio3-patches", build=patched, inputs=longer, tokens=16),
]
