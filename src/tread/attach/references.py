"""Reference tokens: how many of a forward's image tokens belong to reference images, which are forced.

The number decides how many tokens a forward keeps, so the host needs it. A family may give it as a tensor on the
device. Then it is read once per sequence length, which synchronises, or inferred from a force mask, which covers the
target's tokens only, and an asynchronous assertion checks it in every forward.
"""

import torch
from torch import Tensor

from tread.attach.family import read_count
from tread.errors import ConfigError

_MISMATCH = (
    "the force mask does not cover just the target's tokens, or there are not as many reference tokens as in an "
    "earlier forward with as many tokens: give a mask of the target's (B, S), or set handle.references before each "
    "forward."
)


class References:
    """The numbers of reference tokens read so far."""

    def __init__(self) -> None:
        self._read: dict[int, int] = {}
        """Number of image tokens -> number of reference tokens among them."""

    def count(self, declared: int | Tensor, tokens: int, mask: Tensor | None) -> int:
        """The number on the host; `declared` is what the family returns for a forward with `tokens` image tokens."""
        if not isinstance(declared, Tensor):
            return declared
        if mask is not None and mask.shape[1] > tokens:
            raise ConfigError(f"force_keep has shape {tuple(mask.shape)}; this forward has {tokens} tokens.")
        count = self._read.get(tokens) if mask is None else tokens - mask.shape[1]
        if count is None:
            count = read_count(declared)
            if not torch.compiler.is_compiling():  # a guard on it would recompile
                self._read[tokens] = count
        torch._assert_async(declared == count, _MISMATCH)  # pyright: ignore[reportPrivateImportUsage]
        return count
