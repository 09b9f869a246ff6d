"""JoyImage-Edit: a video, several images, a table for text; Edit Plus: images of other sizes in each sample, a mask."""

from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.transformer_joyimage import JoyImageEditTransformer3DModel
from diffusers.models.transformers.transformer_joyimage_edit_plus import JoyImageEditPlusTransformer3DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 5
SIZE: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 16,
    "num_layers": 3,
    "rope_dim_list": [4, 6, 6],
}


def edit(**options: Any) -> JoyImageEditTransformer3DModel:
    return JoyImageEditTransformer3DModel(**SIZE, **options)


def plus() -> JoyImageEditPlusTransformer3DModel:
    return JoyImageEditPlusTransformer3DModel(**SIZE)


def video(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 3, 4, 6),
        "timestep": torch.linspace(200, 800, 2)[:batch],
        "encoder_hidden_states": random(2, batch, TEXT, 16),
    }


def images(batch: int) -> dict:
    """Two reference images, then the target, each of 2 x 4 patches."""
    return video(batch) | {"hidden_states": random(3, batch, 3, 4, 1, 4, 8)}


def patched(batch: int) -> dict:
    """The first sample has two reference images and no padding, the second one and three places of padding."""
    return {
        "hidden_states": random(1, batch, 23, 4, 1, 2, 2),
        "timestep": torch.linspace(200, 800, 2)[:batch],
        "encoder_hidden_states": random(2, batch, TEXT, 16),
        "shape_list": [[(1, 3, 5), (1, 2, 2), (2, 1, 2)], [(1, 2, 7), (1, 2, 3)]][:batch],
    }


def masked(batch: int) -> dict:
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return patched(batch) | {"encoder_hidden_states_mask": mask[:batch]}


BLOCKS = (Blocks(name="double_blocks", returns=0, image="first", keys="first"),)
CASES = [
    Case(name="joyimage-edit", build=edit, inputs=images, blocks=BLOCKS, tokens=24, references=16),
    Case(name="joyimage-edit-video", build=partial(edit, rope_type="mrope"), inputs=video, blocks=BLOCKS, tokens=18),
    Case(name="joyimage-edit-plus", build=plus, inputs=patched, blocks=BLOCKS, tokens=23, references=9),
    Case(name="joyimage-edit-plus-masked", build=plus, inputs=masked, blocks=BLOCKS, tokens=23, references=9),
]
