"""NucleusMoE-Image: with and without a text mask, with experts.

The experts choose tokens, so what a token gets depends on which others are there, and the oracle, which runs at full
length, can only follow where the experts take all of them: the capacity factor is the number of experts.
"""

from functools import partial

from diffusers.models.transformers.transformer_nucleusmoe_image import NucleusMoEImageTransformer2DModel

from tests.tiny.case import Blocks, Case, tiny, usual, valid

TEXT = 6
SIZES = {"in_channels": 8, "out_channels": 2, "num_key_value_heads": 1, "mlp_ratio": 6.0}
EXPERTS = {"num_experts": 3, "moe_intermediate_dim": 16, "capacity_factors": 3.0}
build = tiny(NucleusMoEImageTransformer2DModel, **SIZES, **EXPERTS, dense_moe_strategy="leave_first_block_dense")


def inputs(batch: int) -> dict:
    return usual(batch, (15, 8), (TEXT, 16)) | {"img_shapes": [(1, 3, 5)] * batch}


def masked(batch: int) -> dict:
    return inputs(batch) | {"encoder_hidden_states_mask": valid(batch, TEXT, 6, 4).long()}


BLOCKS = (Blocks(name="transformer_blocks", keys="first", image_queries=True),)
case = partial(Case, build=build, blocks=BLOCKS, tokens=15)
CASES = [case(name="nucleusmoe-image", inputs=inputs), case(name="nucleusmoe-image-masked", inputs=masked)]
