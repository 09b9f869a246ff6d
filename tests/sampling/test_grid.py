"""Grids and PNGs: every pixel where it belongs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tread.sampling import fonts
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


def margin(*names: str) -> np.ndarray:
    """What stands left of a grid of one black image per name."""
    image = torch.zeros(len(names), 48, 48, 1, dtype=torch.uint8)
    return np.asarray(make_grid(image, columns=1, rows=names))[:, :-48]


@pytest.mark.parametrize(("one", "other"), [("ä", "é"), ("ж", "ш"), ("α", "β")])
def test_names_beyond_ascii_are_not_boxes(one: str, other: str) -> None:
    """A font that lacks a character draws the same box for all of them."""
    ours, theirs = margin(one), margin(other)
    assert ours.shape != theirs.shape or (ours != theirs).any()
    assert margin(one).shape[1] < margin(ascii(one)[1:-1]).shape[1], "it is written, not escaped"


def test_a_composed_and_a_decomposed_name_look_alike() -> None:
    assert (margin("Käfer") == margin("Ka\u0308fer")).all()


def test_names_that_no_font_has_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "FILES", ())
    monkeypatch.setattr(fonts, "_of_matplotlib", list)
    assert (margin("cat", "猫") == margin("cat", "\\u732b")).all()
    assert (margin("Käfer") == margin("K\\xe4fer")).all()


def test_control_characters_are_escaped() -> None:
    assert (margin("a\nb", "ä\t") == margin("a\\nb", "\\xe4\\t")).all()


def test_each_name_is_whole_and_beside_its_row() -> None:
    names = ("i", "a long name", "gray")
    together = margin(*names)  # three rows of 48 pixels, 4 apart
    for row, name in enumerate(names):
        alone = margin(name)
        band = together[row * 52 : row * 52 + 48]
        assert (band[:, : alone.shape[1]] == alone).all(), "at the same height as of a row alone"
        assert (band[:, alone.shape[1] :] == 255).all()
    written = np.flatnonzero((margin("x") < 255).any(1))
    assert abs(written.mean() - 24) < 6, "in the middle of the row"


def test_names_without_a_row_take_no_room() -> None:
    image = torch.zeros(1, 48, 48, 1, dtype=torch.uint8)
    assert make_grid(image, columns=1, rows=["i", "a much longer name"]) == make_grid(image, columns=1, rows=["i"])
