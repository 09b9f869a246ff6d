"""Krea 2."""

from tread.attach.family import Family, Rotary, Side, Stack, length

KREA2 = Family(
    models=("Krea2Transformer2DModel",),
    stacks=(
        # text and image tokens joined, text first, in the stream and on both axes
        Stack(
            name="transformer_blocks", sides=(Side(name="image_rotary_emb", dim=0), Side(name="attention_mask", dim=3))
        ),
    ),
    tokens=length("hidden_states"),
    rotary=(Rotary(function="diffusers.models.transformers.transformer_krea2.apply_rotary_emb", axis=1),),
)
