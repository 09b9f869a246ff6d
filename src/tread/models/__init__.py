"""The networks: a class-conditional diffusion transformer, its sizes by name, and published weights."""

from tread.models.dit import DiT
from tread.models.sizes import SIZES, model_size
from tread.models.weights import load_published_dit

__all__ = ["SIZES", "DiT", "load_published_dit", "model_size"]
