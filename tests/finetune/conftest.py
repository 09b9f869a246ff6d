"""Pictures to encode, and collections that are quick."""

import gc
from pathlib import Path

import pytest

from tests.tiny.pictures import write_noise


@pytest.fixture(autouse=True)
def collected() -> None:
    """A run asks for three collections, which would look through all of torch, diffusers and transformers each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of six pictures of two shapes, with captions."""
    return write_noise(tmp_path / "data")
