"""Cosmos: learned position embeddings, timesteps per frame, image context and ControlNet's residuals.

`concat_padding_mask` is off: it needs torchvision and only adds a channel before the layers.
"""

from functools import partial

import torch
from diffusers.models.transformers.transformer_cosmos import CosmosTransformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual, valid

TEXT = 5
SIZES = {"mlp_ratio": 2.0, "adaln_lora_dim": 8, "max_size": (4, 8, 8)}
IMAGE_CONTEXT = {"img_context_dim_in": 10, "img_context_num_tokens": 4, "img_context_dim_out": 32}
TEXT_PROJECTION = {"crossattn_proj_in_channels": 14, "encoder_hidden_states_channels": 12}
build = tiny(CosmosTransformer3DModel, **SIZES, concat_padding_mask=False)
projected = partial(build, use_crossattn_projection=True, **IMAGE_CONTEXT, **TEXT_PROJECTION)
transfer = partial(projected, extra_pos_embed_type=None, controlnet_block_every_n=2)


def inputs(batch: int) -> dict:
    return usual(batch, (4, 3, 4, 6), (TEXT, 12)) | {"attention_mask": valid(batch, TEXT, 3, 5), "fps": 16}


def frame_times(batch: int) -> torch.Tensor:
    return torch.tensor([[0.0, 0.2, 0.2], [0.0, 0.8, 0.8]])[:batch].view(batch, 1, 3, 1, 1)


def per_frame(batch: int) -> dict:
    return inputs(batch) | {
        "hidden_states": random(1, batch, 3, 3, 4, 6),
        "condition_mask": (random(3, batch, 1, 3, 4, 6) > 0).float(),
        "timestep": frame_times(batch),
        "attention_mask": None,
    }


def transfer_inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),
        "timestep": frame_times(batch),
        "encoder_hidden_states": (random(2, batch, TEXT, 14), random(4, batch, 4, 10)),
        "block_controlnet_hidden_states": [random(5, batch, 18, 32), random(6, batch, 18, 32)],
    }


case = partial(Case, build=build, blocks=(Blocks(name="transformer_blocks"),), tokens=18)
CASES = [
    case(name="cosmos", inputs=inputs),
    case(name="cosmos-per-frame", inputs=per_frame),
    case(name="cosmos-transfer", build=transfer, inputs=transfer_inputs),
]
