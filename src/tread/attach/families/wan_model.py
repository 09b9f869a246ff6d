"""Wan 2.1 and 2.2 in the layout of their authors' own code, VACE included.

Samples are a list, padded to `seq_len` tokens after the last. The padding is kept; attention leaves it out by
`seq_lens`. The rotary function reads positions from the grid, so it runs on full sequences.
"""

import math
from typing import Any

from tread.attach.family import Arguments, Family, Rotary, Side, Stack


def _tokens(model: Any, arguments: Arguments) -> int:
    sizes = zip(arguments["x"][0].shape[1:], model.patch_size, strict=True)  # frames, rows, columns
    return math.prod(size // patch for size, patch in sizes)


def _refuse(model: Any, arguments: Arguments) -> str | None:
    shapes = {tuple(sample.shape[1:]) for sample in arguments["x"]}
    if len(shapes) > 1:
        return (
            f"the videos of the batch have different sizes, {sorted(shapes)}, and all samples keep one number of "
            "tokens. Batch videos of one size."
        )
    if tuple(getattr(model, "window_size", (-1, -1))) != (-1, -1):
        return "its attention looks at a window of neighbours, which dropped tokens would widen."
    return None


WAN_MODEL = Family(
    models=("WanModel",),
    parts=("patch_embedding", "patch_size", "time_projection", "freqs", "head"),
    stacks=(
        Stack(
            name="blocks",
            stream="x",
            image="first",
            sides=(
                Side(name="freqs", dim=1, full=True),
                # 2.2 has a timestep for every token, (B, L, 6, D); 2.1 has one per sample, (B, 6, D)
                Side(name="e", dim=1, ndim=4),
                # VACE's layers add the outputs of its control branch
                Side(name="hints", dim=1, optional=True),
            ),
            counts=("seq_lens",),
        ),
    ),
    inputs=("x",),
    tokens=_tokens,
    rotary=(Rotary(function="rope_apply", of="blocks.0.self_attn", axis=1, tables=()),),
    refuse=_refuse,
    notes="The videos of a batch must have one size. Give TI2V's clean first frame and VACE's reference frames as "
    "force_keep. VACE's control branch runs dense. Not with sequence parallelism.",
)
