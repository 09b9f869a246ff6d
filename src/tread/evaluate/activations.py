"""The output of a feature extractor for a batch of images."""

from typing import NamedTuple

from torch import Tensor


class Activations(NamedTuple):
    pool: Tensor
    """(B, D), one feature vector per image."""
    spatial: Tensor | None = None
    """(B, E), spatial features, for sFID."""
    probabilities: Tensor | None = None
    """(B, classes), rows that sum to 1, for the Inception Score."""
