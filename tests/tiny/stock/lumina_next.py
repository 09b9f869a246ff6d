"""Lumina-Next-T2I."""

from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina
from diffusers.models.transformers.lumina_nextdit2d import LuminaNextDiT2DModel

from tests.tiny.case import Blocks, Case, tiny, usual, valid

SIZES = {"sample_size": 8, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16, "cross_attention_dim": 10}
build = tiny(LuminaNextDiT2DModel, **SIZES)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 8, 12), (5, 10)) | {
        "encoder_mask": valid(batch, 5, 5, 3).float(),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(8, 16, 16),
        "cross_attention_kwargs": {},  # the stock class fails on its own default, None
    }


CASES = [Case(name="lumina-next", build=build, inputs=inputs, blocks=(Blocks(name="layers"),), tokens=24)]
