"""PRX (Photoroom)."""

from tread.attach.family import Family, Side, Stack

PRX = Family(
    models=("PRXTransformer2DModel",),
    stacks=(Stack(name="blocks", sides=(Side(name="image_rotary_emb", dim=2),)),),
)
