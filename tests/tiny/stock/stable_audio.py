"""Stable Audio Open: a global token before the audio tokens, with and without masks."""

from functools import partial

from diffusers.models.embeddings import get_1d_rotary_pos_embed
from diffusers.models.transformers.stable_audio_transformer import StableAudioDiTModel

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

TOKENS, TEXT = 18, 5
SIZES = {"sample_size": TOKENS, "num_key_value_attention_heads": 1, "cross_attention_dim": 16, "time_proj_dim": 8}
build = tiny(StableAudioDiTModel, **SIZES, global_states_input_dim=10, cross_attention_input_dim=12)


def inputs(batch: int) -> dict:
    table = get_1d_rotary_pos_embed(8, TOKENS + 1, use_real=True, repeat_interleave_real=False)
    more = {"global_hidden_states": random(3, batch, 1, 10), "rotary_embedding": table}
    return usual(batch, (4, TOKENS), (TEXT, 12)) | more


def masked(batch: int) -> dict:
    audio = valid(batch, TOKENS, TOKENS - 2, TOKENS - 2)
    return inputs(batch) | {"attention_mask": audio, "encoder_attention_mask": valid(batch, TEXT, 3, 5)}


case = partial(Case, build=build, blocks=(Blocks(name="transformer_blocks"),), tokens=TOKENS)
CASES = [case(name="stable-audio", inputs=inputs), case(name="stable-audio-masked", inputs=masked)]
