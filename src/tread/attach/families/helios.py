"""Helios: a Wan that carries the history of a long video before the frames it denoises."""

from tread.attach.family import Family, Side, Stack, patches, setting

HELIOS = Family(
    models=("HeliosTransformer3DModel",),
    stacks=(
        Stack(
            name="blocks",
            sides=(Side(name="rotary_emb", dim=1), Side(name="temb", dim=1, ndim=4)),
            # the layers locate the end of the history by counting back from the end of the stream
            counts=("original_context_length",),
        ),
    ),
    tokens=patches("hidden_states", 2, 3, 4, size=setting("config.patch_size")),
    notes="History tokens are always kept; force_keep covers the frames being denoised.",
)
