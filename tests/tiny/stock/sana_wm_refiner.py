"""SANA-WM's refiner, alone and after frames it holds in its cache."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_sana_wm_refiner import (
    SanaWMLTX2RefinerTransformer3DModel,
    SanaWMRefinerKVCache,
)
from torch import Tensor, nn

from tests.tiny.case import TINY, Blocks, Case, random, tiny, valid
from tests.tiny.stock.ltx2 import AUDIO_SIZES, SIZES

TEXT = 7
LAYERS = TINY["num_layers"]


@dataclass(frozen=True, kw_only=True)
class Cached(Case):
    """Keys and values of the cache come as lists over the layers, so that a sample can be cut out of them."""

    def call(self, model: nn.Module, arguments: dict[str, Any]) -> Tensor:
        given = dict(arguments)
        sink, history, rotations = given.pop("sink"), given.pop("history"), given.pop("sink_rotations")
        cache = SanaWMRefinerKVCache(LAYERS)
        cache.sink_pe = tuple(rotations)
        for i in range(LAYERS):
            cache.get(i).store_sink(*sink[i].unbind(1))
            cache.get(i).store_history(*history[i].unbind(1))
        return super().call(model, given | {"kv_cache": cache, "kv_cache_mode": "inject"})


build = tiny(SanaWMLTX2RefinerTransformer3DModel, **SIZES, **AUDIO_SIZES)


def rotations(batch: int, frames: list[int], rope: str) -> list[Tensor]:
    """Tables for frames of 2 x 3 tokens."""
    model, device = build(rope_type=rope), torch.device("cpu")
    return list(model.build_rotary_emb_for_absolute_positions(batch, frames, 2, 3, device, fps=24.0))


def inputs(batch: int, rope: str = "interleaved") -> dict:
    """Frames 4, 5 and 6 of a video; every token has its own timestep."""
    return {
        "hidden_states": random(1, batch, 18, 8),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "timestep": torch.tensor([800.0, 300.0])[:batch, None] * torch.linspace(0, 1, 18),
        "video_rotary_emb": rotations(batch, [4, 5, 6], rope),
        "encoder_attention_mask": valid(batch, TEXT, TEXT, 4).long(),
    }


def cached(batch: int) -> dict:
    """Frame 0, rotated as frame 2, and frame 3 are in the cache: key and value, (B, 2, tokens, D), for every layer."""
    return inputs(batch) | {
        "sink": [random(10 + i, batch, 2, 6, 24) for i in range(LAYERS)],
        "sink_rotations": rotations(batch, [2], "interleaved"),
        "history": [random(20 + i, batch, 2, 6, 24) for i in range(LAYERS)],
    }


def capturing(model: Any, batch: int) -> dict:
    return inputs(batch) | {"kv_cache": SanaWMRefinerKVCache(LAYERS), "kv_cache_mode": "capture_pre_rope"}


case = partial(Case, build=build, blocks=(Blocks(name="transformer_blocks"),), tokens=18)
split = partial(case, build=partial(build, rope_type="split"), inputs=partial(inputs, rope="split"))
BLOCKS = (Blocks(name="transformer_blocks", cached=12),)
CASES = [
    case(name="sana-wm-refiner", inputs=inputs, refused=capturing),
    split(name="sana-wm-refiner-split"),
    Cached(name="sana-wm-refiner-cached", build=build, inputs=cached, blocks=BLOCKS, tokens=18),
]
