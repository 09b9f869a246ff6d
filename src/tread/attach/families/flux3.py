"""FLUX.3."""

from tread.attach.family import Family, Rotary, Side, Stack, length

FLUX3 = Family(
    models=("Flux3Transformer2DModel",),
    stacks=(
        Stack(name="mode_blocks.image", sides=(Side(name="temb_mod", dim=1), Side(name="image_rotary_emb", dim=0))),
        # the image tokens, then those of reference images; text comes before both in the table
        Stack(
            name="single_transformer_blocks",
            returns=1,
            image="first",
            sides=(Side(name="temb_mod", dim=1), Side(name="image_rotary_emb", dim=0, after="encoder_hidden_states")),
        ),
    ),
    tokens=length("hidden_states"),
    rotary=(Rotary(function="diffusers.models.transformers.transformer_flux3.apply_rotary_emb", axis=1),),
    notes="Reference images are a stream of their own before the joint layers and always kept.",
)
