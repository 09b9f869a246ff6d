"""Ideogram 4."""

from torch import nn

from tread.attach.family import Arguments, Family, Side, Stack

_IMAGE = 2  # how `indicator` marks an image token


def _tokens(model: nn.Module, arguments: Arguments) -> int:
    """No shape tells how long the text is, so this waits for the device."""
    return int((arguments["indicator"][0] == _IMAGE).sum())


def _refuse(model: nn.Module, arguments: Arguments) -> str | None:
    image = arguments["indicator"] == _IMAGE  # (B, L)
    total, last = image.sum(dim=1), image.flip(1).cumprod(dim=1).sum(dim=1)  # (B,)
    if ((total == last) & (total == total[0])).all():
        return None
    return "every sample must end with its image tokens, and all samples have the same number of them."


IDEOGRAM4 = Family(
    models=("Ideogram4Transformer2DModel",),
    stacks=(
        # padding, text and image tokens joined, in this order
        Stack(
            name="layers",
            sides=(
                Side(name="attention_mask", dim=3),
                Side(name="attention_mask", dim=2),
                Side(name="image_rotary_emb", dim=1),
                Side(name="adaln_input", dim=1),
            ),
        ),
    ),
    tokens=_tokens,
    refuse=_refuse,
    notes="The number of image tokens is read from the indicator, which waits for the device in every forward.",
)
