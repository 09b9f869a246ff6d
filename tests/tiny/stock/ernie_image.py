"""ERNIE-Image: texts of other lengths."""

import torch
from diffusers.models.transformers.transformer_ernie_image import ErnieImageTransformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny

build = tiny(ErnieImageTransformer2DModel, ffn_hidden_size=32, patch_size=2, text_in_dim=12)


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 6, 10),
        "timestep": torch.tensor([200.0, 800.0])[:batch],
        "text_bth": random(2, batch, 6, 12),
        "text_lens": torch.tensor([6, 4])[:batch],
    }


BLOCKS = (Blocks(name="layers", keyword="x", dim=0, image="first", keys="first"),)
CASES = [Case(name="ernie-image", build=build, inputs=inputs, blocks=BLOCKS, tokens=15)]
