"""AnyFlow, bidirectional."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_anyflow import AnyFlowTransformer3DModel

from tests.tiny.case import Blocks, Case, random, tiny

build = tiny(AnyFlowTransformer3DModel, attention_head_dim=12, image_dim=16)


def inputs(batch: int) -> dict:
    """Timesteps differ from frame to frame."""
    return {
        "hidden_states": random(1, batch, 3, 4, 4, 6),  # 3 frames of 2 x 3 tokens
        "timestep": torch.tensor([[900.0, 600.0, 300.0], [800.0, 500.0, 100.0]])[:batch],
        "r_timestep": torch.tensor([[400.0, 300.0, 0.0], [700.0, 100.0, 50.0]])[:batch],
        "encoder_hidden_states": random(2, batch, 7, 16),
    }


def image(batch: int) -> dict:
    return inputs(batch) | {"encoder_hidden_states_image": random(3, batch, 5, 16)}


case = partial(Case, build=build, blocks=(Blocks(name="blocks"),), tokens=18)
CASES = [case(name="anyflow", inputs=inputs), case(name="anyflow-i2v", inputs=image)]
