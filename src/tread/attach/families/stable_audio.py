"""Stable Audio Open."""

from tread.attach.family import SHARED_ROTARY, Family, Side, Stack, length

STABLE_AUDIO = Family(
    models=("StableAudioDiTModel",),
    # the global token comes before the audio tokens, also in the mask and the table
    stacks=(
        Stack(
            name="transformer_blocks", sides=(Side(name="attention_mask", dim=1), Side(name="rotary_embedding", dim=0))
        ),
    ),
    tokens=length("hidden_states", 2),
    rotary=(SHARED_ROTARY,),
)
