"""Wan 2.1 and 2.2 (T2V, I2V, TI2V), VACE and ChronoEdit."""

from dataclasses import replace

from tread.attach.family import Family, Side, Stack

WAN = Family(
    models=("WanTransformer3DModel", "ChronoEditTransformer3DModel"),
    stacks=(
        Stack(
            name="blocks",
            sides=(
                Side(name="rotary_emb", dim=1),
                # TI2V has a timestep for every token, (B, S, 6, D); all others have one per sample, (B, 6, D)
                Side(name="temb", dim=1, ndim=4),
            ),
        ),
    ),
    notes="Give TI2V's clean first frame as force_keep.",
)

WAN_VACE = replace(
    WAN,
    models=("WanVACETransformer3DModel",),
    # the control branch adds to every token between layers
    residuals=("control_hidden_states",),
    notes="Give the reference frames as force_keep. The control branch runs dense.",
)
