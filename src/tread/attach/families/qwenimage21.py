"""Qwen-Image 2.1."""

import math
from typing import Any

from tread.attach.family import Arguments, Family, Rotary, Side, Stack


def _tokens(model: Any, arguments: Arguments) -> int:
    """The target image ends the joint sequence; what comes before it, condition images too, is prompt."""
    return math.prod(arguments["img_shapes"][0][-1])


def _refuse(model: Any, arguments: Arguments) -> str | None:
    processors = {type(block.attn.processor).__name__ for block in model.transformer_blocks}
    if arguments.get("kv_cache_mode") == "cached" or "QwenImage21FlexAttnProcessor" not in processors:
        return None
    return "flex attention's block mask is made for the full sequence. Set QwenImage21AttnProcessor instead."


QWEN_IMAGE21 = Family(
    models=("QwenImage21Transformer2DModel",),
    stacks=(
        Stack(
            name="transformer_blocks",
            sides=(
                Side(name="rotary_emb", dim=0),
                Side(name="target_token_mask", dim=0, same=True),
                Side(name="key_valid", dim=1),
                Side(name="attention_mask", dim=3),  # over the keys of a cached prompt and the target
            ),
        ),
    ),
    tokens=_tokens,
    rotary=(Rotary(function="diffusers.models.transformers.transformer_qwenimage21.apply_rotary_emb_qwen", axis=1),),
    refuse=_refuse,
    notes="Condition images are part of the prompt and always kept. Not with the flex attention processor.",
)
