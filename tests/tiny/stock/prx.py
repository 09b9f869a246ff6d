"""PRX, with a text mask, and the 7B's resolution embedding without one."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel

from tests.tiny.case import Blocks, Case, random

BLOCKS = (Blocks(name="blocks", image_queries=True),)

build = partial(
    PRXTransformer2DModel,
    in_channels=4,
    context_in_dim=10,
    hidden_size=16,
    mlp_ratio=2,
    num_heads=2,
    depth=3,
    axes_dim=[4, 4],
)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 8, 12),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "encoder_hidden_states": random(2, batch, 5, 10),
    }


def masked(batch: int) -> dict:
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    return inputs(batch) | {"attention_mask": mask[:batch]}


CASES = [
    Case(name="prx", build=build, inputs=masked, blocks=BLOCKS, tokens=24),
    Case(
        name="prx-7b",
        build=partial(build, bottleneck_size=6, resolution_embeds=True),
        inputs=inputs,
        blocks=BLOCKS,
        tokens=24,
    ),
]
