"""JoyImage-Edit and Edit Plus."""

import math
from typing import Any

from tread.attach.family import Arguments, Family, Rotary, Side, Stack, length

_ROTATE = "diffusers.models.transformers.transformer_joyimage._apply_rotary_emb"


def _patches(model: Any, arguments: Arguments) -> int:
    """The input is latents (B, C, T, H, W), or several images (B, N, C, T, H, W)."""
    shape, (frames, rows, columns) = arguments["hidden_states"].shape, model.config.patch_size
    images = shape[1] if len(shape) == 6 else 1
    return images * shape[-3] // frames * (shape[-2] // rows) * (shape[-1] // columns)


def _later_images(model: Any, arguments: Arguments) -> int:
    """The target is the last of several images; the model puts it first."""
    shape = arguments["hidden_states"].shape
    return _patches(model, arguments) // shape[1] * (shape[1] - 1) if len(shape) == 6 else 0


def _later_patches(model: Any, arguments: Arguments) -> int:
    """Each sample is its target, then its reference images, then padding."""
    target = min(math.prod(shapes[0]) for shapes in arguments["shape_list"])
    return arguments["hidden_states"].shape[1] - target


JOYIMAGE_EDIT = Family(
    models=("JoyImageEditTransformer3DModel",),
    stacks=(
        Stack(
            name="double_blocks",
            returns=0,
            sides=(Side(name="image_rotary_emb", dim=0, member=0),),  # the second table is the text's
        ),
    ),
    tokens=_patches,
    references=_later_images,
    rotary=(Rotary(function=_ROTATE, axis=1, tables=(2,), turns=2),),
    notes="Reference images are kept unless reference_tokens is 'route'.",
)

JOYIMAGE_EDIT_PLUS = Family(
    models=("JoyImageEditPlusTransformer3DModel",),
    stacks=(
        Stack(
            name="double_blocks",
            returns=0,
            image="first",  # before text, in the mask
            sides=(Side(name="image_rotary_emb", dim=1), Side(name="attention_mask", dim=3)),
        ),
    ),
    tokens=length("hidden_states"),
    references=_later_patches,
    notes="Reference images are kept unless reference_tokens is 'route'.",
)
