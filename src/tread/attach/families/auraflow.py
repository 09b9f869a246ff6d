"""AuraFlow."""

from tread.attach.family import Family, Stack, patches, setting

AURAFLOW = Family(
    models=("AuraFlowTransformer2DModel",),
    stacks=(
        Stack(name="joint_transformer_blocks", returns=1),
        # register tokens, text and image tokens are joined here, in this order
        Stack(name="single_transformer_blocks"),
    ),
    tokens=patches("hidden_states", -2, -1, size=setting("config.patch_size")),
)
