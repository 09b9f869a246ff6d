"""FLUX.3: text to image, reference images, a flow map."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_flux3 import Flux3Transformer2DModel

from tests.tiny.case import Blocks, Case, random, tiny, usual
from tests.tiny.stock.flux2 import SIZES, TEXT, grid, text_ids

build = tiny(Flux3Transformer2DModel, **SIZES, cond_in_channels=6, timestep_channels=16)


def inputs(batch: int) -> dict:
    return usual(batch, (15, 8), (TEXT, 16)) | {"img_ids": grid(3, 5), "txt_ids": text_ids()}


def edit(batch: int) -> dict:
    more = {"image_cond_hidden_states": random(3, batch, 8, 6), "image_cond_ids": grid(2, 4, time=10)}
    return inputs(batch) | more


def distilled(batch: int) -> dict:
    return inputs(batch) | {"target_timestep": torch.linspace(0.1, 0.6, 2)[:batch]}


SINGLE = Blocks(name="single_transformer_blocks", returns=1, image="first", keys=TEXT)
case = partial(Case, build=build, blocks=(Blocks(name="mode_blocks.image"), SINGLE), tokens=15)
CASES = [
    case(name="flux3", inputs=inputs),
    case(name="flux3-edit", inputs=edit),
    case(name="flux3-flow-map", build=partial(build, flow_map=True), inputs=distilled),
]
