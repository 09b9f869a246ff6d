"""Cosmos: learned position embeddings, timesteps per frame, image context and ControlNet's residuals.

`concat_padding_mask` is off: it needs torchvision and only adds a channel before the layers.
"""

from typing import Any

import torch
from diffusers.models.transformers.transformer_cosmos import CosmosTransformer3DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5


def build(**more: Any) -> CosmosTransformer3DModel:
    config: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 3,
        "mlp_ratio": 2.0,
        "text_embed_dim": 12,
        "adaln_lora_dim": 8,
        "max_size": (4, 8, 8),
        "patch_size": (1, 2, 2),
        "concat_padding_mask": False,
    }
    return CosmosTransformer3DModel(**config | more)


def transfer() -> CosmosTransformer3DModel:
    return build(
        extra_pos_embed_type=None,
        controlnet_block_every_n=2,
        img_context_dim_in=10,
        img_context_num_tokens=4,
        img_context_dim_out=32,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=14,
        encoder_hidden_states_channels=12,
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),
        "timestep": torch.tensor([0.2, 0.8])[:batch],
        "encoder_hidden_states": random(2, batch, TEXT, 12),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:batch].bool(),
        "fps": 16,
    }


def per_frame(batch: int) -> dict:
    return inputs(batch) | {
        "hidden_states": random(1, batch, 3, 3, 4, 6),
        "condition_mask": (random(3, batch, 1, 3, 4, 6) > 0).float(),
        "timestep": torch.tensor([[0.0, 0.2, 0.2], [0.0, 0.8, 0.8]])[:batch].view(batch, 1, 3, 1, 1),
        "attention_mask": None,
    }


def transfer_inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),
        "timestep": torch.tensor([[0.0, 0.2, 0.2], [0.0, 0.8, 0.8]])[:batch].view(batch, 1, 3, 1, 1),
        "encoder_hidden_states": (random(2, batch, TEXT, 14), random(4, batch, 4, 10)),
        "block_controlnet_hidden_states": [random(5, batch, 18, 32), random(6, batch, 18, 32)],
    }


BLOCKS = (Blocks(name="transformer_blocks"),)
CASES = [
    Case(name="cosmos", build=build, inputs=inputs, blocks=BLOCKS, tokens=18),
    Case(name="cosmos-per-frame", build=build, inputs=per_frame, blocks=BLOCKS, tokens=18),
    Case(name="cosmos-transfer", build=transfer, inputs=transfer_inputs, blocks=BLOCKS, tokens=18),
]
