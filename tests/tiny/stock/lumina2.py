"""Lumina-Image 2.0."""

from functools import partial

from diffusers.models.transformers.transformer_lumina2 import Lumina2Transformer2DModel

from tests.tiny.case import Blocks, Case, tiny, usual, valid

CAPTIONS = [3, 7]
ROTATIONS = {"axes_dim_rope": (4, 2, 2), "axes_lens": (16, 16, 16)}
build = tiny(Lumina2Transformer2DModel, **ROTATIONS, num_attention_heads=4, multiple_of=16, cap_feat_dim=10)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 8, 12), (7, 10)) | {"encoder_attention_mask": valid(batch, 7, *CAPTIONS)}


def alike(batch: int) -> dict:
    """Captions of one length: the model makes no mask."""
    return inputs(batch) | {"encoder_attention_mask": valid(batch, 7, 7, 7)}


case = partial(Case, build=build, blocks=(Blocks(name="layers"),), tokens=24)
CASES = [
    case(name="lumina2", inputs=inputs, offsets=lambda batch: CAPTIONS[:batch]),
    case(name="lumina2-alike", inputs=alike),
]
