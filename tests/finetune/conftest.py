"""Pictures to encode."""

from pathlib import Path

import pytest

from tests.tiny.pictures import write_noise


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of six pictures of two shapes, with captions."""
    return write_noise(tmp_path / "data")
