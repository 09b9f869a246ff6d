"""The networks for training from scratch: a class-conditional diffusion transformer, its named sizes, and published
weights.

It imports torch, `tread.errors`, `tread.routing` and `tread.kernels`; data, objectives and jobs are unknown to it.
"""

from tread.models.dit import DiT
from tread.models.sizes import SIZES, model_size
from tread.models.weights import load_published_dit

__all__ = ["SIZES", "DiT", "load_published_dit", "model_size"]
