"""The networks: a class-conditional diffusion transformer, its sizes by name, and published weights."""

from tread.models.dit import DiT
from tread.models.presets import PRESETS, preset
from tread.models.weights import load_published_dit

__all__ = ["PRESETS", "DiT", "load_published_dit", "preset"]
