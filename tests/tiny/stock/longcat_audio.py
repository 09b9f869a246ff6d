"""LongCat AudioDiT: modulation shared by all layers or their own, with and without a mask of the audio."""

from functools import partial

from diffusers.models.transformers.transformer_longcat_audio_dit import LongCatAudioDiTTransformer

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

TEXT = 5
SIZES = {"dit_dim": 32, "dit_depth": 3, "dit_heads": 2, "dit_text_dim": 12, "latent_dim": 4}
build = tiny(LongCatAudioDiTTransformer, **SIZES, ff_mult=2.0)
local = partial(build, adaln_type="local", cross_attn_norm=True, use_latent_condition=False)


def inputs(batch: int) -> dict:
    more = {"encoder_attention_mask": valid(batch, TEXT, 3, 5), "latent_cond": random(3, batch, 18, 4)}
    return usual(batch, (18, 4), (TEXT, 12)) | more


def masked(batch: int) -> dict:
    return inputs(batch) | {"attention_mask": valid(batch, 18, 18, 14), "latent_cond": None}


case = partial(Case, blocks=(Blocks(name="blocks"),), tokens=18)
CASES = [
    case(name="longcat-audio", build=build, inputs=inputs),
    case(name="longcat-audio-masked", build=local, inputs=masked),
]
