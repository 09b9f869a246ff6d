"""What an extractor says of a batch of images."""

from typing import NamedTuple

from torch import Tensor


class Activations(NamedTuple):
    pool: Tensor
    """(B, D), one feature vector an image."""
    spatial: Tensor | None = None
    """(B, E), features that keep their place in the image; sFID takes them."""
    probabilities: Tensor | None = None
    """(B, classes), rows that sum to 1; the Inception Score takes them."""
