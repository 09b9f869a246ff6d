"""SkyReels-V2: T2V, I2V and diffusion forcing."""

from tread.attach.family import Family, Side, Stack

SKYREELS_V2 = Family(
    models=("SkyReelsV2Transformer3DModel",),
    stacks=(
        Stack(
            name="blocks",
            sides=(
                Side(name="rotary_emb", dim=1),
                # diffusion forcing has a timestep for every frame, spread over its tokens: (B, 6, S, D)
                Side(name="temb", dim=2, ndim=4),
                # causal blocks of frames: queries and keys
                Side(name="attention_mask", dim=2),
                Side(name="attention_mask", dim=3),
            ),
        ),
    ),
)
