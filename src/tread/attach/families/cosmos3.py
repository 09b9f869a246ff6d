"""Cosmos 3: video, with or without sound and actions. A forward is one sample, and its stream has no batch axis."""

import math
from typing import Any

from torch import Tensor

from tread.attach.family import Arguments, Family, Side, Stack


def _tokens(model: Any, arguments: Arguments) -> int:
    return sum(math.prod(shape) for shape in arguments["vision_token_shapes"])


def _references(model: Any, arguments: Arguments) -> int | Tensor:
    """The tokens of the clean frames before the first frame to denoise; each video lists its frames to denoise in
    order."""
    total = 0
    for shape, noisy in zip(arguments["vision_token_shapes"], arguments["vision_noisy_frame_indexes"], strict=True):
        if len(noisy):
            return total + noisy[0] * math.prod(shape[1:])
        total += math.prod(shape)
    return total


COSMOS3 = Family(
    models=("Cosmos3OmniTransformer",),
    stacks=(
        Stack(
            name="layers",
            stream="gen_seq",
            dim=0,
            returns=1,
            # sound and actions come after the video; the text is a stream of its own
            image="first",
            # cosines and sines of the text, then of this stream
            sides=(Side(name="rotary_emb", dim=0, member=2), Side(name="rotary_emb", dim=0, member=3)),
        ),
    ),
    tokens=_tokens,
    references=_references,
    references_at="first",
    notes="Video tokens are routed; text, sound and action tokens are not. Clean frames at the start are kept unless "
    "reference_tokens is 'route'.",
)
