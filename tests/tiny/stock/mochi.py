"""Mochi 1. It attends sample by sample, with the valid text tokens only."""

from diffusers.models.transformers.transformer_mochi import MochiTransformer3DModel

from tests.tiny.case import Blocks, Case, tiny, usual, valid

TEXT = 5
SIZES = {"pooled_projection_dim": 16, "text_embed_dim": 16, "max_sequence_length": TEXT}
build = tiny(MochiTransformer3DModel, **SIZES)


def inputs(batch: int) -> dict:
    more = {"encoder_attention_mask": valid(batch, TEXT, 3, 5)}
    return usual(batch, (4, 3, 4, 6), (TEXT, 16), (200.0, 800.0)) | more


BLOCKS = (Blocks(name="transformer_blocks", returns=0, image="first", keys="first"),)
CASES = [Case(name="mochi", build=build, inputs=inputs, blocks=BLOCKS, tokens=18)]
