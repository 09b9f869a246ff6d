"""HunyuanImage 2.1, and its refiner, whose latents have a frame axis."""

from typing import Any

import torch
from diffusers.models.transformers.transformer_hunyuanimage import HunyuanImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random


def build(**more: Any) -> HunyuanImageTransformer2DModel:
    config: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "patch_size": (1, 1),
        "text_embed_dim": 12,
        "text_embed_2_dim": 10,
        "rope_axes_dim": (8, 8),
    }
    return HunyuanImageTransformer2DModel(**config | more)


def refiner() -> HunyuanImageTransformer2DModel:
    more = {"text_embed_2_dim": None, "guidance_embeds": True, "use_meanflow": True}
    return build(patch_size=(1, 1, 1), rope_axes_dim=(4, 6, 6), **more)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 4, 6),
        "timestep": torch.tensor([200.0, 800.0])[:batch],
        "encoder_hidden_states": random(2, batch, 5, 12),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:batch],
        "encoder_hidden_states_2": random(3, batch, 4, 10),
        "encoder_attention_mask_2": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])[:batch],
    }


def refiner_inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 2, 3, 4),
        "timestep": torch.tensor([200.0, 800.0])[:batch],
        "timestep_r": torch.tensor([100.0, 300.0])[:batch],
        "encoder_hidden_states": random(2, batch, 5, 12),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:batch],
        "guidance": torch.full((batch,), 3500.0),
    }


BLOCKS = (
    Blocks(name="transformer_blocks", returns=0, image="first", keys="first"),
    Blocks(name="single_transformer_blocks", returns=0, image="first", keys="first"),
)
DEFECTS = {"checkpoint": "the stock forward passes keywords to a checkpoint function that takes none: a TypeError"}
GRAPHS = {"graphs": "the stock forward is not compiled as a whole but function by function, and so are the hooks"}
CASES = [
    Case(name="hunyuanimage", build=build, inputs=inputs, blocks=BLOCKS, tokens=24, defects=DEFECTS | GRAPHS),
    Case(name="hunyuanimage-refiner", build=refiner, inputs=refiner_inputs, blocks=BLOCKS, tokens=24, defects=DEFECTS),
]
