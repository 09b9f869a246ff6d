"""Qwen-Image: text to image, Edit (with and without per-token modulation), Layered, ControlNet."""

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 6


def build(**options: Any) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=8,
        out_channels=2,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        **options,
    )


def inputs(batch: int, shapes: tuple[tuple[int, int, int], ...] = ((1, 3, 5),)) -> dict:
    tokens = sum(rows * columns for _, rows, columns in shapes)
    return {
        "hidden_states": random(1, batch, tokens, 8),
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])[:batch],
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "img_shapes": [list(shapes)] * batch,
    }


def unmasked(batch: int) -> dict:
    return inputs(batch) | {"encoder_hidden_states_mask": None}


def controlled(batch: int) -> dict:
    return inputs(batch) | {"controlnet_block_samples": [random(3 + i, batch, 15, 32) for i in range(2)]}


def layered(batch: int) -> dict:
    return inputs(batch, ((1, 2, 3),) * 4) | {"additional_t_cond": torch.tensor([0, 1])[:batch]}


EDIT = partial(inputs, shapes=((1, 3, 5), (1, 2, 3), (1, 1, 4)))
BLOCKS = (Blocks(name="transformer_blocks", returns=1),)
CASES = [
    Case(name="qwenimage", build=build, inputs=inputs, blocks=BLOCKS, tokens=15),
    Case(name="qwenimage-unmasked", build=build, inputs=unmasked, blocks=BLOCKS, tokens=15),
    Case(name="qwenimage-edit", build=build, inputs=EDIT, blocks=BLOCKS, tokens=25, references=10),
    Case(
        name="qwenimage-edit-zero-cond",
        build=partial(build, zero_cond_t=True),
        inputs=EDIT,
        blocks=BLOCKS,
        tokens=25,
        references=10,
    ),
    Case(
        name="qwenimage-layered",
        build=partial(build, use_additional_t_cond=True, use_layer3d_rope=True),
        inputs=layered,
        blocks=BLOCKS,
        tokens=24,
        references=6,
    ),
    Case(name="qwenimage-controlnet", build=build, inputs=controlled, blocks=BLOCKS, tokens=15),
]
