"""Tiny pipelines on disk, each written once by every test process."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
