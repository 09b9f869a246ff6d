"""The networks for training from scratch: a class-conditional diffusion transformer, its named sizes, and published
weights.

The package imports torch, `tread.errors`, `tread.routing` and `tread.kernels`, and knows no data, objective or job.
"""

from tread.models.dit import DiT
from tread.models.sizes import SIZES, model_size
from tread.models.weights import load_published_dit

__all__ = ["SIZES", "DiT", "load_published_dit", "model_size"]
