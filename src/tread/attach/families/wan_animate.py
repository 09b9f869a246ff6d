"""Wan 2.2 Animate."""

from tread.attach.family import Family, Side, Stack, patches, setting

_patch = setting("config.patch_size")

WAN_ANIMATE = Family(
    models=("WanAnimateTransformer3DModel",),
    stacks=(Stack(name="blocks", sides=(Side(name="rotary_emb", dim=1),)),),
    tokens=patches("hidden_states", 2, 3, 4, size=_patch),
    # the first frame is the image of the character
    references=patches("hidden_states", 3, 4, size=lambda model: _patch(model)[1:]),
    references_at="first",
    # between layers each frame of the stream attends to its frame of the face
    per_block=True,
    notes="The character's image, the first frame, is kept unless reference_tokens is 'route'.",
)
