"""Ideogram 4."""

import torch
from torch import nn

from tread.attach.family import Arguments, Family, Side, Stack, read_count, square

_IMAGE = 2  # the value of `indicator` for an image token
_LAYOUT = "every sample must end with its image tokens, and all samples have the same number of them."


def _tokens(model: nn.Module, arguments: Arguments) -> int:
    """No shape tells the text's length, so the count is read from the device; in compiled code it is a constant."""
    return read_count((arguments["indicator"][0] == _IMAGE).sum())


def _refuse(model: nn.Module, arguments: Arguments) -> str | None:
    image = arguments["indicator"] == _IMAGE  # (B, L)
    total, last = image.sum(dim=1), image.flip(1).cumprod(dim=1).sum(dim=1)  # (B,)
    fits = (total == last) & (total == _tokens(model, arguments))
    if torch.compiler.is_compiling():
        torch._assert_async(fits.all(), _LAYOUT)  # pyright: ignore[reportPrivateImportUsage]
        return None
    return None if fits.all() else _LAYOUT


IDEOGRAM4 = Family(
    models=("Ideogram4Transformer2DModel",),
    stacks=(
        # padding, text and image tokens joined, in this order
        Stack(
            name="layers",
            sides=(
                *square("attention_mask", 3, 2),
                Side(name="image_rotary_emb", dim=1),
                Side(name="adaln_input", dim=1),
            ),
        ),
    ),
    tokens=_tokens,
    refuse=_refuse,
    notes="The number of image tokens is read from the indicator, which waits for the device in every forward.",
)
