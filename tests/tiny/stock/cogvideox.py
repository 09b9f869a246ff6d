"""CogVideoX 1.0 (with and without rotations), 1.5, and ConsisID."""

from functools import partial
from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel
from diffusers.models.transformers.consisid_transformer_3d import ConsisIDTransformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual

TEXT = 7
SIZES: dict[str, Any] = {"text_embed_dim": 16, "sample_width": 6, "sample_height": 4, "sample_frames": 9}
# as many heads as samples: a table per sample would be taken for one per head
build_2b = tiny(CogVideoXTransformer3DModel, **SIZES, max_text_seq_length=TEXT)
rotated = partial(build_2b, use_rotary_positional_embeddings=True)

FACE = {"LFE_id_dim": 16, "LFE_vit_dim": 16, "LFE_depth": 5, "LFE_dim_head": 8, "LFE_num_heads": 2, "LFE_ff_mult": 1}
FACE_TOKENS = {"LFE_num_id_token": 2, "LFE_num_querie": 3, "LFE_output_dim": 21}  # two thirds of the width
CROSS_ATTENTION = {"cross_attn_interval": 2, "cross_attn_dim_head": 8, "cross_attn_num_heads": 2}
consisid = tiny(
    ConsisIDTransformer3DModel,
    use_rotary_positional_embeddings=True,
    is_train_face=True,
    num_layers=4,
    max_text_seq_length=TEXT,
    **SIZES | FACE | FACE_TOKENS | CROSS_ATTENTION,
)


def rotations(frames: int) -> Any:
    """Tables (S, D) for frames of 2 x 3 tokens."""
    return get_3d_rotary_pos_embed(16, ((0, 0), (2, 3)), (2, 3), frames)


def inputs_2b(batch: int) -> dict:
    return usual(batch, (3, 4, 4, 6), (TEXT, 16), (800, 300))  # 3 frames of 2 x 3 tokens


def inputs(batch: int) -> dict:
    return inputs_2b(batch) | {"image_rotary_emb": rotations(3)}


def inputs_15(batch: int) -> dict:
    """4 frames, 2 to a token, and an offset."""
    more = {"image_rotary_emb": rotations(2), "ofs": torch.full((batch,), 2.0)}
    return inputs_2b(batch) | {"hidden_states": random(1, batch, 4, 4, 4, 6)} | more


def face(batch: int) -> dict:
    more = {"id_cond": random(3, batch, 16), "id_vit_hidden": [random(4 + i, batch, 4, 16) for i in range(5)]}
    return inputs(batch) | more


build = partial(rotated, use_learned_positional_embeddings=True)
build_15 = partial(rotated, patch_size_t=2, patch_bias=False, ofs_embed_dim=16)
case = partial(Case, blocks=(Blocks(name="transformer_blocks", returns=0),), tokens=18)
CASES = [
    case(name="cogvideox", build=build, inputs=inputs),
    case(name="cogvideox-2b", build=build_2b, inputs=inputs_2b),
    case(name="cogvideox-1.5", build=build_15, inputs=inputs_15, tokens=12),
    case(name="consisid", build=consisid, inputs=face),
]
