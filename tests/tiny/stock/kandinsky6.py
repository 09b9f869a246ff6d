"""Kandinsky 6: video with audio, video alone, and a reference frame at the end."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_kandinsky6 import Kandinsky6Transformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

TEXT, AUDIO = 5, 7
SIZES = {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 12, "in_text_dim2": 8, "ff_dim": 32}
build = tiny(Kandinsky6Transformer3DModel, **SIZES, in_audio_dim=6, out_audio_dim=6)
# the switches the released checkpoints set, and an audio width of its own
switched = partial(build, ca_rope=True, cross_gates=True, fix_modulation=True, text_token_padding=True)
released = partial(switched, model_dim_a=16, axes_dims_a=(4, 6, 6))


def inputs(batch: int) -> dict:
    more = {"pooled_projections": random(3, batch, 8)}
    return usual(batch, (3, 4, 6, 9), (TEXT, 12), (200.0, 800.0)) | more


def with_audio(batch: int) -> dict:
    more = {"audio_hidden_states": random(4, batch, AUDIO, 6), "encoder_attention_mask": valid(batch, TEXT, 3, 5)}
    return inputs(batch) | more


def with_reference(batch: int) -> dict:
    return inputs(batch) | {
        "hidden_states": random(1, batch, 4, 4, 6, 9),
        "visual_token_type_ids": torch.tensor([[0, 0, 0, 1]] * batch),
        "visual_rope_pos": [torch.tensor([0, 1, 2, 0]), torch.arange(2), torch.arange(3)],
    }


BLOCKS = (Blocks(name="visual_transformer_blocks", keyword="vis", returns=0),)
case = partial(Case, build=build, blocks=BLOCKS, tokens=18)
referring = partial(case, build=partial(build, visual_token_type_num_embeddings=2), tokens=24, references=6)
CASES = [
    case(name="kandinsky6", inputs=inputs),
    case(name="kandinsky6-audio", build=released, inputs=with_audio),
    referring(name="kandinsky6-reference", inputs=with_reference),
]
