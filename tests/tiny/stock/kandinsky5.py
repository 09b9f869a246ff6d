"""Kandinsky 5: text to video and, with the condition's channels, image to video.

The stock attention rounds rotated queries and keys to bfloat16 whatever the model's dtype. Two ways to compute the same
number, apart by one unit in the last place, may then round to neighbours, so exactness to 1e-5 can only be seen
without the rounding: the cases run the stock code with that one dtype exchanged.
"""

from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5AttnProcessor, Kandinsky5Transformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual

TEXT = 5


def without_rounding(function: Any) -> FunctionType:
    """The function with `float32` wherever an inner function of it says `bfloat16`."""

    def exchange(inner: Any) -> Any:
        if not isinstance(inner, CodeType):
            return inner
        return inner.replace(co_names=tuple("float32" if name == "bfloat16" else name for name in inner.co_names))

    code = function.__code__.replace(co_consts=tuple(exchange(const) for const in function.__code__.co_consts))
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


class ExactProcessor(Kandinsky5AttnProcessor):
    """The stock attention without the rounding."""

    __call__ = without_rounding(Kandinsky5AttnProcessor.__call__)


SIZES = {"in_text_dim": 12, "in_text_dim2": 8, "ff_dim": 64}
stock = tiny(Kandinsky5Transformer3DModel, **SIZES)


def build(visual_cond: bool = False) -> Kandinsky5Transformer3DModel:
    model = stock(visual_cond=visual_cond)
    processor: Any = ExactProcessor()
    model.set_attn_processor(processor)
    return model


def inputs(batch: int) -> dict:
    return usual(batch, (3, 4, 6, 4), (TEXT, 12), (200.0, 800.0)) | {
        "pooled_projections": random(3, batch, 8),
        "visual_rope_pos": [torch.arange(3), torch.arange(2), torch.arange(3)],
        "text_rope_pos": torch.arange(TEXT),
        "scale_factor": (1.0, 2.0, 2.0),
    }


def conditioned(batch: int) -> dict:
    return inputs(batch) | {"hidden_states": random(1, batch, 3, 4, 6, 9)}


def sparse(model: Any, batch: int) -> dict:
    """Attention by blocks of 8 x 8 tokens, which only one backend can do."""
    for processor in model.attn_processors.values():
        processor._attention_backend = "flex"
    more = {
        "hidden_states": random(1, batch, 1, 16, 16, 4),
        "visual_rope_pos": [torch.arange(1), torch.arange(8), torch.arange(8)],
        "sparse_params": {"to_fractal": True, "sta_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "P": 0.9},
    }
    return inputs(batch) | more


BLOCKS = (Blocks(name="visual_transformer_blocks", keyword="visual_embed"),)
case = partial(Case, build=build, blocks=BLOCKS, tokens=18)
CASES = [
    case(name="kandinsky5", inputs=inputs, refused=sparse),
    case(name="kandinsky5-i2v", build=partial(build, visual_cond=True), inputs=conditioned),
]
