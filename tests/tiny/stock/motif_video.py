"""Motif-Video: with a decoder that starts a new stream, and without; image conditions; text cross-attention."""

from functools import partial

from diffusers.models.transformers.transformer_motif_video import MotifVideoTransformer3DModel

from tests.tiny.case import Case, random, tiny, usual, valid
from tests.tiny.stock.hunyuan_video import BLOCKS

TEXT = 5
build = tiny(MotifVideoTransformer3DModel, num_layers=2, num_single_layers=3, mlp_ratio=2.0)
TEXT_ATTENTION = {"enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True}
decoder = partial(build, num_decoder_layers=2, image_embed_dim=8, **TEXT_ATTENTION)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 3, 4, 6), (TEXT, 12), (200, 800))


def conditioned(batch: int) -> dict:
    more = {"encoder_attention_mask": valid(batch, TEXT, 2, 4).long(), "image_embeds": random(3, batch, 4, 8)}
    return inputs(batch) | more


case = partial(Case, blocks=BLOCKS, tokens=18)
CASES = [
    case(name="motif-video", build=build, inputs=inputs),
    case(name="motif-video-decoder", build=decoder, inputs=conditioned),
]
