"""Ovis-Image."""

from tread.attach.families.flux2 import SIDES
from tread.attach.family import Family, Rotary, Stack, length

OVIS_IMAGE = Family(
    models=("OvisImageTransformer2DModel",),
    stacks=(
        Stack(name="transformer_blocks", returns=1, sides=SIDES),
        Stack(name="single_transformer_blocks", returns=1, sides=SIDES),
    ),
    tokens=length("hidden_states"),
    rotary=(Rotary(function="diffusers.models.transformers.transformer_ovis_image.apply_rotary_emb", axis=1),),
)
