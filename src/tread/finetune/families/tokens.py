"""`Patch`: the latents of one token; counts tokens, and maps values between latents and tokens."""

import math
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F


class Patch(NamedTuple):
    """The latents of one token."""

    frames: int
    rows: int
    columns: int

    def grid(self, latents: Tensor) -> tuple[int, int, int]:
        """Tokens along frames, rows and columns of latents (B, C, [F,] H, W)."""
        frames, rows, columns = _sizes(latents)
        return frames // self.frames, rows // self.rows, columns // self.columns

    def tokens(self, latents: Tensor) -> int:
        """Number of tokens of latents of this shape."""
        return math.prod(self.grid(latents))

    def any_in_token(self, latents: Tensor) -> Tensor:
        """Bool, shaped like latents with one channel -> (B, S): True for tokens with any True in their patch."""
        video = latents.reshape(len(latents), 1, *_sizes(latents)).float()  # (B, 1, F, H, W)
        return F.max_pool3d(video, tuple(self)).flatten(1) > 0  # (B, S)

    def of_tokens(self, values: Tensor, latents: Tensor) -> Tensor:
        """A number per token, (B, S) -> the same number at each latent of its patch, (B, 1, [F,] H, W)."""
        video = values.reshape(len(values), 1, *self.grid(latents))
        for axis, size in zip((2, 3, 4), self, strict=True):
            video = video.repeat_interleave(size, axis)
        return video.reshape(len(values), 1, *latents.shape[2:])  # (B, 1, [F,] H, W)


def _sizes(latents: Tensor) -> tuple[int, int, int]:
    *frames, rows, columns = latents.shape[2:]
    return (frames[0] if frames else 1), rows, columns
