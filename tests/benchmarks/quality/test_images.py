"""The images travel unchanged, and the reference is of those that are trained on."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.quality.__main__ import main
from benchmarks.quality.images import Cifar10, load, pack, tiles, unpack
from benchmarks.quality.judge import read_reference_facts
from benchmarks.quality.run import run, work
from tests.tiny.quality import job_of, pictures, spec_of
from tread.data import ImageFolder
from tread.errors import DataError


def test_images_survive_packing(tmp_path: Path) -> None:
    images, test = pictures(200, 0)[..., ::-1], pictures(100, 1)
    labels = np.arange(200) % 10
    package = tmp_path / "package.tgz"
    with tarfile.open(package, "w:gz") as archive:

        def add(name: str, content: bytes) -> None:
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))

        for number in range(1, 6):  # five batches, of which the first has all the images here
            part = images if number == 1 else np.zeros_like(test)
            file = io.BytesIO()
            Image.fromarray(part.reshape(len(part), -1, 3)).save(file, "png", compress_level=1)
            add(f"data_batch_{number}.png", file.getvalue())
        file = io.BytesIO()
        Image.fromarray(test.reshape(100, -1, 3)).save(file, "png")
        add("test_batch.png", file.getvalue())
        add("train_lables.json", json.dumps([*labels.tolist(), *[7] * 400]).encode())
        add("test_lables.json", json.dumps([3] * 100).encode())
    parts = pack(package, tmp_path / "parts", size=100)
    assert [path.stem for path in parts][:3] == ["train-0", "train-1", "train-2"]
    assert (tiles(parts[1]) == images[100:]).all()
    unpack(tmp_path / "parts", tmp_path / "data")
    read, read_labels = load(tmp_path / "data", "train")
    assert (read[: len(images)] == images).all()
    assert (read_labels[: len(images)] == labels).all()
    assert (load(tmp_path / "data", "test")[0] == test).all()


def test_the_training_images_as_files(prepared: Path, tmp_path: Path) -> None:
    assert main(["folder", str(tmp_path / "images"), "--work", str(prepared)]) == 0
    files = ImageFolder(tmp_path / "images", size=32, flip=False)
    images, labels = load(prepared / "data", "train")
    assert len(files) == len(images)
    order = np.argsort(labels, kind="stable")  # files are sorted by class
    for i, number in enumerate(order):
        x, label = files[i]
        assert label == labels[number]
        torch.testing.assert_close(x, torch.from_numpy(images[number]).permute(2, 0, 1) / 127.5 - 1)


def test_the_dataset_is_train_then_test(prepared: Path) -> None:
    data = Cifar10(prepared / "data")
    assert (data.trained, data.held_out, len(data)) == (200, 100, 300)
    x, label = data[203]
    assert label == 3
    expected = torch.from_numpy(pictures(100, 4)[3]).permute(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(x, expected)


def test_a_reference_of_other_images_is_refused(prepared: Path, tmp_path: Path) -> None:
    parts, moved = prepared.parent / "parts", tmp_path / "work"
    shutil.copytree(prepared, moved, ignore=shutil.ignore_patterns("weights"))
    assert read_reference_facts(moved)["train_images"] == 200
    for kind in ("images", "labels"):
        shutil.copy(moved / "data" / f"train-0.{kind}.npy", moved / "data" / f"train-1.{kind}.npy")
    message = "the reference is of 200 images, and 400 are trained on: prepare again with --weights"
    for make in (run, work):
        with pytest.raises(DataError, match=message):
            make(spec_of(moved, tmp_path, job_of("dense")))
    assert main(["prepare", str(parts), "--work", str(moved)]) == 0
    assert not (moved / "reference.npz").exists()
    with pytest.raises(DataError, match=r"no reference in .*: prepare again with --weights"):
        run(spec_of(moved, tmp_path, job_of("dense")))
