"""Chroma."""

from tread.attach.family import Family, Rotary, Side, Stack, length

# both cover text and image tokens, text first, in both stacks
_SIDES = (Side(name="image_rotary_emb", dim=0), Side(name="attention_mask", dim=1))

CHROMA = Family(
    models=("ChromaTransformer2DModel",),
    stacks=(
        Stack(name="transformer_blocks", returns=1, sides=_SIDES),
        Stack(name="single_transformer_blocks", sides=_SIDES),  # text and image tokens joined, text first
    ),
    tokens=length("hidden_states"),
    residuals=("controlnet_block_samples", "controlnet_single_block_samples"),
    # Chroma's layers use FLUX's attention processor
    rotary=(Rotary(function="diffusers.models.transformers.transformer_flux.apply_rotary_emb", axis=1),),
)
