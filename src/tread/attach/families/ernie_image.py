"""ERNIE-Image."""

from tread.attach.family import Family, Side, Stack, patches, setting

ERNIE_IMAGE = Family(
    models=("ErnieImageTransformer2DModel",),
    stacks=(
        # (L, B, D), image tokens first, then text
        Stack(
            name="layers",
            stream="x",
            dim=0,
            image="first",
            sides=(
                Side(name="rotary_pos_emb", dim=1),
                Side(name="temb", dim=0, same=True),  # the sample's modulation, repeated for each token
                Side(name="attention_mask", dim=3),
            ),
        ),
    ),
    tokens=patches("hidden_states", 2, 3, size=setting("patch_size")),
)
