"""LongCat-Image and its Edit."""

from tread.attach.families.flux2 import later_images
from tread.attach.family import Family, Rotary, Side, Stack, length

# the table covers text and image tokens, text first, in both stacks
_ROPE = Side(name="image_rotary_emb", dim=0)

LONGCAT_IMAGE = Family(
    models=("LongCatImageTransformer2DModel",),
    stacks=(
        Stack(name="transformer_blocks", returns=1, sides=(_ROPE,)),
        Stack(name="single_transformer_blocks", returns=1, sides=(_ROPE,)),
    ),
    tokens=length("hidden_states"),
    references=later_images,
    rotary=(Rotary(function="diffusers.models.transformers.transformer_longcat_image.apply_rotary_emb", axis=1),),
    notes="The reference image of Edit is kept unless reference_tokens is 'route'.",
)
