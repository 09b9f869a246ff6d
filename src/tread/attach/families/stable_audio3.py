"""Stable Audio 3."""

from tread.attach.family import Family, Rotary, Side, Stack, patches, setting

STABLE_AUDIO3 = Family(
    models=("StableAudio3DiTModel",),
    # memory tokens come before the audio tokens, also in the table; the inpainting condition covers audio only
    stacks=(Stack(name="transformer_blocks", sides=(Side(name="rope", dim=0), Side(name="local_seq", dim=1))),),
    tokens=patches("hidden_states", 2, size=setting("config.patch_size")),
    rotary=(Rotary(function="diffusers.models.transformers.transformer_stable_audio3._apply_rotary_partial", axis=1),),
)
