"""Grids and PNGs: every pixel where it belongs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tread.sampling.grid import image_names, make_grid, save_images


@pytest.mark.parametrize("channels", [1, 3])
def test_images_stand_row_by_row_enlarged_by_whole_factors_on_white(channels: int) -> None:
    images = torch.randint(0, 200, (5, 20, 30, channels), dtype=torch.uint8)
    grid = np.asarray(make_grid(images, columns=3)).reshape(2 * 40 + 4, 3 * 60 + 8, channels)
    expected = np.full_like(grid, 255)
    for i, image in enumerate(images.numpy()):
        top, left = i // 3 * 44, i % 3 * 64
        expected[top : top + 40, left : left + 60] = np.kron(image, np.ones((2, 2, 1), np.uint8))
    assert (grid == expected).all()


def test_images_that_are_large_enough_keep_their_size() -> None:
    assert make_grid(torch.zeros(4, 48, 48, 3, dtype=torch.uint8), columns=2).size == (100, 100)


def test_files_are_counted_within_their_class(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (4, 5, 6, 3), dtype=torch.uint8)
    names, folder = image_names([3, 3, 12, 3]), tmp_path / "new" / "folder"
    assert names == ["0003-00000.png", "0003-00001.png", "0012-00000.png", "0003-00002.png"]
    save_images(images, names, folder)
    for name, image in zip(names, images.numpy(), strict=True):
        assert (np.asarray(Image.open(folder / name)) == image).all()
