"""Fibo 2: gist tokens before the image, or after it where texts differ in length; context images."""

from functools import partial
from typing import Any

from diffusers.models.transformers.transformer_bria_fibo2 import BriaFibo2Transformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

TEXT = 9
GIST = {"min_num_gist_tokens": 2, "max_num_gist_tokens": 6, "gist_min_text_len": 2, "gist_max_text_len": 10}
SIZES = {"dim": 32, "cap_feat_dim": 12, "axes_lens": (12, 8, 8), "injection_layer_ids": (1,)}
build = tiny(BriaFibo2Transformer2DModel, **GIST, **SIZES, gist_step=2, perceiver_num_layers=1)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 6, 10), (2, TEXT, 12))


def ragged(batch: int) -> dict:
    """Texts of 9 and 5 words: 6 and 4 gist tokens."""
    return inputs(batch) | {"encoder_attention_mask": valid(batch, TEXT, 9, 5)}


def context(batch: int) -> dict:
    return {"context_latents": [random(3, batch, 4, 4, 6), random(4, batch, 4, 2, 4)]}


case = partial(Case, build=build, blocks=(Blocks(name="layers", keyword="x"),), tokens=15)
gist_first = partial(case, offsets=lambda batch: [6] * batch)
image_first = partial(case, offsets=lambda batch: [0] * batch)
EDIT: dict[str, Any] = {"tokens": 23, "references": 8}
CASES = [
    gist_first(name="bria-fibo2", inputs=inputs),
    image_first(name="bria-fibo2-ragged", inputs=ragged),
    gist_first(name="bria-fibo2-edit", inputs=lambda batch: inputs(batch) | context(batch), **EDIT),
    image_first(name="bria-fibo2-ragged-edit", inputs=lambda batch: ragged(batch) | context(batch), **EDIT),
]
