"""Tiny pipelines on disk, each written once by every test process, and pictures to encode."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .encoded import RNG
from .tiny import TINY

PipelineFolder = Callable[[str], Path]


@pytest.fixture(scope="session")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory, real_data: Path) -> PipelineFolder:
    """`pipeline_folder("flux")`: a tiny FLUX as `save_pretrained` leaves it; not to be written to."""
    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            TINY[name](folders[name])
        return folders[name]

    return find


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of six pictures of two shapes, with captions."""
    (tmp_path / "data").mkdir()
    for n in range(6):
        shape = (64, 64, 3) if n < 4 else (48, 96, 3)
        Image.fromarray(RNG.integers(0, 256, shape, dtype=np.uint8)).save(tmp_path / "data" / f"{n}.png")
        (tmp_path / "data" / f"{n}.txt").write_text(f"picture {n}")
    return tmp_path / "data"
