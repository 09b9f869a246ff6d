"""Fibo 2: gist tokens before the image, or after it where texts differ in length; context images."""

import torch
from diffusers.models.transformers.transformer_bria_fibo2 import BriaFibo2Transformer2DModel

from tests.tiny.case import Blocks, Case, random

TEXT = 9


def build() -> BriaFibo2Transformer2DModel:
    return BriaFibo2Transformer2DModel(
        in_channels=4,
        patch_size=2,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=12,
        injection_layer_ids=(1,),
        perceiver_num_layers=1,
        min_num_gist_tokens=2,
        max_num_gist_tokens=6,
        gist_step=2,
        gist_min_text_len=2,
        gist_max_text_len=10,
        axes_dims=(4, 6, 6),
        axes_lens=(12, 8, 8),
    )


def inputs(batch: int) -> dict:
    return {
        "hidden_states": random(1, batch, 4, 6, 10),
        "timestep": torch.linspace(0.2, 0.8, 2)[:batch],
        "encoder_hidden_states": random(2, batch, 2, TEXT, 12),
    }


def ragged(batch: int) -> dict:
    """Texts of 9 and 5 words: 6 and 4 gist tokens."""
    mask = torch.arange(TEXT) < torch.tensor([9, 5])[:, None]
    return inputs(batch) | {"encoder_attention_mask": mask[:batch]}


def context(batch: int) -> dict:
    return {"context_latents": [random(3, batch, 4, 4, 6), random(4, batch, 4, 2, 4)]}


def edit(batch: int) -> dict:
    return inputs(batch) | context(batch)


def ragged_edit(batch: int) -> dict:
    return ragged(batch) | context(batch)


BLOCKS = (Blocks(name="layers", keyword="x"),)
CASES = [
    Case(name="bria-fibo2", build=build, inputs=inputs, blocks=BLOCKS, tokens=15, offsets=lambda batch: [6] * batch),
    Case(
        name="bria-fibo2-ragged",
        build=build,
        inputs=ragged,
        blocks=BLOCKS,
        tokens=15,
        offsets=lambda batch: [0] * batch,
    ),
    Case(
        name="bria-fibo2-edit",
        build=build,
        inputs=edit,
        blocks=BLOCKS,
        tokens=23,
        offsets=lambda batch: [6] * batch,
        references=8,
    ),
    Case(
        name="bria-fibo2-ragged-edit",
        build=build,
        inputs=ragged_edit,
        blocks=BLOCKS,
        tokens=23,
        offsets=lambda batch: [0] * batch,
        references=8,
    ),
]
