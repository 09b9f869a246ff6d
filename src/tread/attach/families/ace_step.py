"""ACE-Step 1.5: music."""

import sys
from typing import Any

from tread.attach.family import Arguments, Family, Rotary, Side, Stack

_MODULE = "diffusers.models.transformers.ace_step_transformer"


def _refuse(model: Any, arguments: Arguments) -> str | None:
    attentions = [layer.self_attn for layer in model.layers]
    if all(attention.sliding_window is None for attention in attentions):
        return None
    if not sys.modules[_MODULE]._is_flash_attention_backend(attentions[0].processor):
        return None
    return (
        "flash attention takes its sliding window by index in the stream, which is not the token's position once "
        "some are dropped. Use the native attention backend, which is given a mask."
    )


ACE_STEP = Family(
    models=("AceStepTransformer1DModel",),
    stacks=(
        Stack(
            name="layers",
            # the sliding window's mask, (1, 1, S, S), is by token position
            sides=(
                Side(name="position_embeddings", dim=0),
                Side(name="attention_mask", dim=2),
                Side(name="attention_mask", dim=3),
            ),
        ),
    ),
    rotary=(Rotary(function=f"{_MODULE}.apply_rotary_emb", axis=2),),
    refuse=_refuse,
    notes="Refused with flash attention backends, which cannot be given the sliding window of the kept tokens.",
)
