"""Samples that cannot be read are listed, and the next one stands for each."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.tiny.runs import write_images
from tread.data import ImageFolder, Readable
from tread.data.readable import FEW, SKIPPED_FILE
from tread.errors import DataError


def broken_at(folder: Path, *places: int, count: int = 20) -> ImageFolder:
    """A folder of images, some of which are cut off."""
    images = ImageFolder(write_images(folder / "images", "a", count=count, size=8), size=8)
    for place in places:
        path = images.path / images.files[place]
        path.write_bytes(path.read_bytes()[:60])
    return images


def test_the_next_readable_sample_of_the_subset_stands_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = broken_at(tmp_path, 4, 8, 18)
    even = Readable(images, range(0, 20, 2), tmp_path / SKIPPED_FILE)
    assert len(even) == 10
    stand_ins = {4: 6, 8: 10, 18: 0}
    for _ in range(2):  # as in a second epoch
        for place, index in enumerate(range(0, 20, 2)):
            assert even[place][0].equal(images[stand_ins.get(index, index)][0])
    listed = (tmp_path / SKIPPED_FILE).read_text().splitlines()
    assert len(listed) == 3
    for line, index in zip(listed, stand_ins, strict=True):
        assert line.startswith(f"cannot read image {images.path / images.files[index]} (")
    assert capsys.readouterr().err.count("The next one stands for it") == 3


def test_a_sample_costs_the_same_in_any_number_of_them(tmp_path: Path) -> None:
    images = broken_at(tmp_path)
    assert Readable(images, range(10**12), tmp_path / SKIPPED_FILE)[5][0].equal(images[5][0])


def test_workers_list_a_sample_once(tmp_path: Path) -> None:
    subset = Readable(broken_at(tmp_path, 3), range(20), tmp_path / SKIPPED_FILE)
    for _ in range(2):
        assert len(torch.cat([x for x, _ in DataLoader(subset, batch_size=5, num_workers=2)])) == 20
    assert len((tmp_path / SKIPPED_FILE).read_text().splitlines()) == 1


@pytest.mark.parametrize(("broken", "count"), [(FEW + 1, 60), (3, 3)])
def test_too_many_end_the_run(tmp_path: Path, broken: int, count: int) -> None:
    subset = Readable(broken_at(tmp_path, *range(broken), count=count), range(count), tmp_path / SKIPPED_FILE)
    with pytest.raises(DataError, match=rf"{broken} of {count} samples cannot be read, the last: cannot read image"):
        subset[0]
