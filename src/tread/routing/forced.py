"""Forced tokens: the tokens that a forward's inputs keep from being dropped, in addition to a user's force mask.

Their positions are the same in all samples, so their number is known on the host and the budget counts it exactly.
Tokens of reference images are not part of the target, so a force mask, which covers the target, leaves them out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tread.routing.state import End


@dataclass(frozen=True, kw_only=True)
class Forced:
    """The image tokens that a forward's inputs force."""

    references: int = 0
    """The number of reference tokens, all at one end."""
    references_at: End = "last"
    """The end of the image tokens that the references are at."""
    pinned: int = 0
    """The number of leading tokens that the layers address by index."""

    @property
    def count(self) -> int:
        """The number of forced tokens in each sample."""
        return self.references + self.pinned

    def with_mask(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """All forced tokens, bool (B, S) like `like`; `mask` (B, S - references) adds its own; None if none."""
        if mask is None and self.count == 0:
            return None
        forced = torch.zeros_like(like, dtype=torch.bool)  # (B, S)
        start = self.references if self.references_at == "first" else 0
        stop = start + like.shape[1] - self.references
        forced[:, :start] = True
        forced[:, stop:] = True
        if mask is not None:
            forced[:, start:stop] = mask.to(like.device, non_blocking=True)
        forced[:, : self.pinned] = True
        return forced


NONE_FORCED = Forced()
