"""Ovis-Image."""

from tread.attach.family import Family, Rotary, Side, Stack, length

_SIDES = (
    # the table covers text and image tokens, text first, in both stacks
    Side(name="image_rotary_emb", dim=0),
    # a mask over keys, or over queries and keys
    Side(name="joint_attention_kwargs.attention_mask", dim=3, ndim=4),
    Side(name="joint_attention_kwargs.attention_mask", dim=2, ndim=4),
)

OVIS_IMAGE = Family(
    models=("OvisImageTransformer2DModel",),
    stacks=(
        Stack(name="transformer_blocks", returns=1, sides=_SIDES),
        Stack(name="single_transformer_blocks", returns=1, sides=_SIDES),
    ),
    tokens=length("hidden_states"),
    rotary=(Rotary(function="diffusers.models.transformers.transformer_ovis_image.apply_rotary_emb", axis=1),),
)
