"""LTX-Video, with one timestep per sample and with one per token."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel

from tests.tiny.case import Blocks, Case, tiny, usual, valid

TEXT = 7
SIZES = {"in_channels": 8, "out_channels": 8, "attention_head_dim": 12, "caption_channels": 16}
VIDEO = {"num_frames": 3, "height": 2, "width": 3}
build = tiny(LTXVideoTransformer3DModel, **SIZES)


def inputs(batch: int) -> dict:
    return usual(batch, (18, 8), (TEXT, 16), (800.0, 300.0)) | {
        "encoder_attention_mask": valid(batch, TEXT, TEXT, 4).long(),
        "rope_interpolation_scale": (8 / 25, 32, 32),
        **VIDEO,
    }


def conditioned(batch: int) -> dict:
    """Every token has its own timestep, and its place is given by hand."""
    timestep = inputs(batch)["timestep"][:, None] * torch.linspace(0, 1, 18)
    grid = torch.meshgrid(torch.arange(3), torch.arange(2), torch.arange(3), indexing="ij")
    places = torch.stack(grid).flatten(1).float()  # (3, S)
    shift = torch.tensor([[[0.0], [0.0], [0.0]], [[1.0], [3.0], [5.0]]])[:batch]
    return inputs(batch) | {"timestep": timestep, "video_coords": places * 100 + shift}


case = partial(Case, build=build, blocks=(Blocks(name="transformer_blocks"),), tokens=18)
CASES = [case(name="ltx", inputs=inputs), case(name="ltx-conditioned", inputs=conditioned)]
