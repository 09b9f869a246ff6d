"""AnyFlow, bidirectional: a Wan 2.1 with two timesteps."""

from tread.attach.family import Family, Side, Stack

ANYFLOW = Family(
    models=("AnyFlowTransformer3DModel",),
    stacks=(
        Stack(
            name="blocks",
            sides=(Side(name="rotary_emb.query", dim=2), Side(name="rotary_emb.key", dim=2), Side(name="temb", dim=1)),
        ),
    ),
)
