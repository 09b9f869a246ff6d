"""Cosmos Predict 1, 2, 2.5 and Transfer 2.5."""

from tread.attach.family import SHARED_ROTARY, Family, Side, Stack

COSMOS = Family(
    models=("CosmosTransformer3DModel",),
    stacks=(
        Stack(
            name="transformer_blocks",
            sides=(
                # a timestep per frame makes the modulation per token
                Side(name="embedded_timestep", dim=1, ndim=3),
                Side(name="temb", dim=1, ndim=3),
                Side(name="image_rotary_emb", dim=0),
                Side(name="extra_pos_emb", dim=1),
                Side(name="controlnet_residual", dim=1),
            ),
        ),
    ),
    rotary=(SHARED_ROTARY,),
    notes="ControlNet's residuals are added inside the layers: a dropped token skips those of its window.",
)
