"""Errors that stay one sentence, files that are whole or absent, pixels for previews."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch._utils import ExceptionWrapper

from tread.data.dataset import to_uint8
from tread.errors import DataError, OutputError
from tread.files import atomic_write


def test_an_error_in_a_worker_arrives_as_its_sentence() -> None:
    """ExceptionWrapper is how a DataLoader carries a worker's error to the parent."""
    with pytest.raises(DataError) as raised:
        raise DataError("sample 0: a colon: is kept (and lines\nare one): too")
    carried = ExceptionWrapper((raised.type, raised.value, raised.tb), where="in DataLoader worker process 0")
    with pytest.raises(DataError) as caught:
        carried.reraise()
    assert str(caught.value) == "sample 0: a colon: is kept (and lines are one): too"


def test_to_uint8_reaches_both_ends_and_clips() -> None:
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]).view(1, 1, 1, 5)
    assert to_uint8(x).tolist() == [[[[0], [0], [128], [255], [255]]]]
    assert to_uint8(torch.zeros(2, 3, 4, 5)).shape == (2, 4, 5, 3)


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    """The system's own error of a write names none."""
    path = tmp_path / "file"
    with pytest.raises(OutputError) as told, atomic_write(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reason = os.strerror(errno.ENOSPC)
    assert str(told.value) == f"cannot write {path} ({reason}): free space, make it writable, or name another folder."
    assert told.value.strerror == reason
    assert os.listdir(tmp_path) == []


def test_a_written_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    with atomic_write(tmp_path / "whole"):
        pass
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode
