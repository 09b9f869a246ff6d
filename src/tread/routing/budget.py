"""The budget: how many tokens a route keeps.

One K serves the whole batch, so that tensors stay dense. Forced tokens come on top of the budget instead of eating it:
the ratio applies to the tokens that may be dropped.
"""

import math

SHAPE_LEVELS = 16
"""With a force mask, K takes at most this many values, so that few shapes are compiled."""


def kept_count(tokens: int, ratio: float, forced: int | None = None, always: int = 0) -> int:
    """How many of `tokens` stay: K = S - int((S - F) * ratio).

    `forced` is the largest number of tokens a force mask names in the batch, or None where there is no mask. With a
    mask, K is rounded up to a multiple of ceil(S / 16), capped at S. `always` others are forced in every sample.

    >>> kept_count(256, 0.5), kept_count(256, 0.5, forced=100)
    (128, 192)
    """
    kept = tokens - int((tokens - always - (forced or 0)) * ratio)
    if forced is None:
        return kept
    level = math.ceil(tokens / SHAPE_LEVELS)
    return min(tokens, math.ceil(kept / level) * level)
