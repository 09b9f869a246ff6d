"""FLUX.1 and Kontext."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from tests.tiny.case import Blocks, Case, any_mask, grid, random, tiny, usual

TEXT = 5
SIZES = {"in_channels": 8, "num_layers": 2, "num_single_layers": 3, "pooled_projection_dim": 16}
build = tiny(FluxTransformer2DModel, **SIZES, guidance_embeds=True)


def inputs(batch: int) -> dict:
    return usual(batch, (16, 8), (TEXT, 16)) | {
        "pooled_projections": random(3, batch, 16),
        "guidance": torch.full((batch,), 3.5),
        "img_ids": grid(4, 4).float(),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def kontext(batch: int) -> dict:
    ids = torch.cat([grid(4, 4), grid(2, 4, image=1)]).float()
    return inputs(batch) | {"hidden_states": random(4, batch, 24, 8), "img_ids": ids}


def controlled(batch: int) -> dict:
    return inputs(batch) | {
        "controlnet_block_samples": [random(5, batch, 16, 32), random(6, batch, 16, 32)],
        "controlnet_single_block_samples": [random(7 + i, batch, 16, 32) for i in range(3)],
    }


def masked(batch: int) -> dict:
    return inputs(batch) | {"joint_attention_kwargs": {"attention_mask": any_mask(8, batch, TEXT + 16)}}


BLOCKS = (Blocks(name="transformer_blocks", returns=1), Blocks(name="single_transformer_blocks", returns=1))
case = partial(Case, build=build, blocks=BLOCKS, tokens=16)
CASES = [
    case(name="flux", inputs=inputs),
    case(name="flux-kontext", inputs=kontext, tokens=24, references=8),
    case(name="flux-controlnet", inputs=controlled),
    case(name="flux-masked", inputs=masked),
]
