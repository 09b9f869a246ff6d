"""Bria 3.2 and Fibo."""

from tread.attach.families.flux2 import SIDES, later_images
from tread.attach.family import Family, Rotary, Side, Stack, length

# the table covers text and image tokens, text first, in both stacks
_ROPE = Side(name="image_rotary_emb", dim=0)
_ROTARY = Rotary(function="diffusers.models.transformers.transformer_bria.apply_rotary_emb", axis=1)

BRIA = Family(
    models=("BriaTransformer2DModel",),
    stacks=(
        Stack(name="transformer_blocks", returns=1, sides=(_ROPE,)),
        Stack(name="single_transformer_blocks", returns=1, sides=(_ROPE,)),
    ),
    tokens=length("hidden_states"),
    residuals=("controlnet_block_samples", "controlnet_single_block_samples"),
    rotary=(_ROTARY,),
)

BRIA_FIBO = Family(
    models=("BriaFiboTransformer2DModel",),
    stacks=(
        Stack(name="transformer_blocks", returns=1, sides=SIDES),
        Stack(name="single_transformer_blocks", sides=SIDES),  # text and image tokens joined, text first
    ),
    tokens=length("hidden_states"),
    references=later_images,
    # the joined layers use Bria's attention processor
    rotary=(Rotary(function="diffusers.models.transformers.transformer_bria_fibo.apply_rotary_emb", axis=1), _ROTARY),
    notes="Reference images of Fibo Edit are kept unless reference_tokens is 'route'.",
)
