"""OmniGen."""

from tread.attach.family import SHARED_ROTARY, Family, Side, Stack, patches, setting, square

OMNIGEN = Family(
    models=("OmniGenTransformer2DModel",),
    stacks=(
        # text with input images, the time token and the image tokens joined, the image tokens last
        Stack(name="layers", sides=(*square("attention_mask", 3, 2), Side(name="image_rotary_emb", dim=0))),
    ),
    tokens=patches("hidden_states", 2, 3, size=setting("config.patch_size")),
    rotary=(SHARED_ROTARY,),
    notes="Input images are part of the prompt and always kept.",
)
