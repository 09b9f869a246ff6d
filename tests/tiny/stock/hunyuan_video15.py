"""HunyuanVideo 1.5: image to video, and text to video (image embeddings of zero)."""

import torch
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15Transformer3DModel

from tests.tiny.case import Blocks, Case, random


def build(meanflow: bool = False) -> HunyuanVideo15Transformer3DModel:
    return HunyuanVideo15Transformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=12,
        text_embed_2_dim=10,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
        use_meanflow=meanflow,
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 2, 3),
        "timestep": torch.tensor([200.0, 800.0])[:batch],
        "encoder_hidden_states": random(2, batch, 5, 12),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:batch],
        "encoder_hidden_states_2": random(3, batch, 4, 10),
        "encoder_attention_mask_2": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])[:batch],
        "image_embeds": random(4, batch, 2, 8),
    }


def text_only(batch: int) -> dict:
    more = {"image_embeds": torch.zeros(batch, 2, 8), "timestep_r": torch.tensor([100.0, 300.0])[:batch]}
    return inputs(batch) | more


BLOCKS = (Blocks(name="transformer_blocks", returns=0, image="first", keys="first"),)
DEFECTS = {"graphs": "the stock forward is not compiled as a whole but function by function, and so are the hooks"}
CASES = [
    Case(name="hunyuanvideo15", build=build, inputs=inputs, blocks=BLOCKS, tokens=18, defects=DEFECTS),
    Case(
        name="hunyuanvideo15-t2v-meanflow",
        build=lambda: build(meanflow=True),
        inputs=text_only,
        blocks=BLOCKS,
        tokens=18,
        defects=DEFECTS,
    ),
]
