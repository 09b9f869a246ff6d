"""LTX-Video."""

from tread.attach.family import Family, Side, Stack

LTX = Family(
    models=("LTXVideoTransformer3DModel",),
    stacks=(
        Stack(
            name="transformer_blocks",
            # one timestep per sample, or one per token where frames are given as conditions
            sides=(Side(name="image_rotary_emb", dim=1), Side(name="temb", dim=1)),
        ),
    ),
    notes="Give tokens of conditioning frames as force_keep.",
)
