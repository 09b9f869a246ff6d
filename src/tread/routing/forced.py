"""Forced tokens: what the inputs of a forward keep from being dropped, beside a user's force mask.

Their places are the same in all samples, so their number is known on the host and the budget counts it exactly. Those
of reference images are no part of the target: a force mask, which is made for the target, does not cover them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tread.routing.state import Where


@dataclass(frozen=True, kw_only=True)
class Forced:
    """The image tokens that a forward's inputs force."""

    references: int = 0
    """How many belong to reference images, at one end."""
    references_at: Where = "last"
    """At which end of the image tokens those are."""
    pinned: int = 0
    """How many, from the first, the layers address by their place."""

    @property
    def count(self) -> int:
        """How many tokens of each sample are forced."""
        return self.references + self.pinned

    def with_mask(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """All forced tokens of `like` (B, S), with those of a force mask (B, S - references); None: there are none."""
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
