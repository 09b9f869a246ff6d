"""Qwen-Image, its Edit versions and Layered."""

import math
from typing import Any

from tread.attach.family import Arguments, Family, Rotary, Side, Stack, length


def _references(model: Any, arguments: Arguments) -> int:
    """Edit appends its reference images to the target; Layered puts one condition image after all the layers."""
    sample = arguments["img_shapes"][0]
    shapes = sample if isinstance(sample, list) else [sample]
    images = shapes[-1:] if model.config.use_layer3d_rope and len(shapes) > 1 else shapes[1:]
    return sum(math.prod(shape) for shape in images)


QWEN_IMAGE = Family(
    models=("QwenImageTransformer2DModel",),
    stacks=(
        Stack(
            name="transformer_blocks",
            returns=1,
            sides=(
                Side(name="image_rotary_emb", dim=0, member=0),  # the second table is the text's
                Side(name="modulate_index", dim=1),
            ),
        ),
    ),
    tokens=length("hidden_states"),
    references=_references,
    residuals=("controlnet_block_samples",),
    rotary=(Rotary(function="diffusers.models.transformers.transformer_qwenimage.apply_rotary_emb_qwen", axis=1),),
    notes="Reference images of Edit and the condition image of Layered are kept unless reference_tokens is 'route'.",
)
