"""HunyuanVideo Framepack: the history's tokens, at three scales, come before the tokens to denoise."""

from typing import Any

from tread.attach.families.hunyuan_video import STACKS
from tread.attach.family import SHARED_ROTARY, Arguments, Family, patches, setting

# argument, frames, rows and columns of latents in one token of the history, whether a remainder is padded to a token
_SCALES = (
    ("latents_clean", (1, 2, 2), False),
    ("latents_history_2x", (2, 4, 4), True),
    ("latents_history_4x", (4, 8, 8), True),
)


def _history(model: Any, arguments: Arguments) -> int:
    total = 0
    for name, patch, padded in _SCALES:
        if arguments.get(name) is not None:
            count = 1
            for size, step in zip(arguments[name].shape[2:], patch, strict=True):
                count *= -(-size // step) if padded else size // step
            total += count
    return total


_target = patches(
    "hidden_states", 2, 3, 4, size=setting("config.patch_size_t", "config.patch_size", "config.patch_size")
)


def _tokens(model: Any, arguments: Arguments) -> int:
    return _history(model, arguments) + _target(model, arguments)


HUNYUAN_VIDEO_FRAMEPACK = Family(
    models=("HunyuanVideoFramepackTransformer3DModel",),
    stacks=STACKS,
    tokens=_tokens,
    references=_history,
    references_at="first",
    rotary=(SHARED_ROTARY,),
    notes="The history's tokens are kept unless reference_tokens is 'route'.",
)
