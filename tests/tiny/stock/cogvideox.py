"""CogVideoX 1.0 (with and without rotations), 1.5, and ConsisID."""

from typing import Any

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXTransformer3DModel
from diffusers.models.transformers.consisid_transformer_3d import ConsisIDTransformer3DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 7
# as many heads as samples: a table per sample would be taken for one per head
TINY: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 16,
    "text_embed_dim": 16,
    "sample_width": 6,
    "sample_height": 4,
    "sample_frames": 9,
    "max_text_seq_length": TEXT,
}


def build_2b() -> CogVideoXTransformer3DModel:
    return CogVideoXTransformer3DModel(num_layers=3, **TINY)


def build() -> CogVideoXTransformer3DModel:
    return CogVideoXTransformer3DModel(
        use_rotary_positional_embeddings=True, use_learned_positional_embeddings=True, num_layers=3, **TINY
    )


def build_15() -> CogVideoXTransformer3DModel:
    return CogVideoXTransformer3DModel(
        use_rotary_positional_embeddings=True, patch_size_t=2, patch_bias=False, ofs_embed_dim=16, num_layers=3, **TINY
    )


def build_consisid() -> ConsisIDTransformer3DModel:
    return ConsisIDTransformer3DModel(
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_interval=2,
        cross_attn_dim_head=8,
        cross_attn_num_heads=2,
        LFE_id_dim=16,
        LFE_vit_dim=16,
        LFE_depth=5,
        LFE_dim_head=8,
        LFE_num_heads=2,
        LFE_num_id_token=2,
        LFE_num_querie=3,
        LFE_output_dim=21,  # two thirds of the width
        LFE_ff_mult=1,
        num_layers=4,
        **TINY,
    )


def rotations(frames: int) -> Any:
    """Tables (S, D) for frames of 2 x 3 tokens."""
    return get_3d_rotary_pos_embed(16, ((0, 0), (2, 3)), (2, 3), frames)


def inputs_2b(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 3, 4, 4, 6),  # 3 frames of 2 x 3 tokens
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "timestep": torch.tensor([800, 300])[:batch],
    }


def inputs(batch: int) -> dict:
    return inputs_2b(batch) | {"image_rotary_emb": rotations(3)}


def inputs_15(batch: int) -> dict:
    """4 frames, 2 to a token, and an offset."""
    return inputs_2b(batch) | {
        "hidden_states": random(1, batch, 4, 4, 4, 6),
        "image_rotary_emb": rotations(2),
        "ofs": torch.full((batch,), 2.0),
    }


def face(batch: int) -> dict:
    return inputs(batch) | {
        "id_cond": random(3, batch, 16),
        "id_vit_hidden": [random(4 + i, batch, 4, 16) for i in range(5)],
    }


BLOCKS = (Blocks(name="transformer_blocks", returns=0),)
CASES = [
    Case(name="cogvideox", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="cogvideox-2b", build=build_2b, inputs=inputs_2b, blocks=BLOCKS, tokens=18),
    Case(name="cogvideox-1.5", build=build_15, inputs=inputs_15, blocks=BLOCKS, tokens=12),
    Case(name="consisid", build=build_consisid, inputs=face, blocks=BLOCKS, tokens=18),
]
