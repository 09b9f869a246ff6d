"""Sources of images to evaluate: a folder, tars, ADM's `.npz` batches, or an array in memory.

- A source has a length and reads any range, so that processes can share it and an interrupted pass resumes.
- Images keep their own size: the extractor resizes, and resizing twice would change the metrics.
- Folders are searched with their subfolders in sorted order. Hidden files and `grid.png`, which `tread sample` writes
  beside its images, are skipped, in a folder and in a tar.
- An `.npz` is read and written in pieces: 50,000 images of 256 pixels are ten gigabytes. It stays open between
  pieces, because a compressed one can only be read forwards.
"""

import hashlib
import io
import os
import tarfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tread.data.images import SUFFIXES, reading, upright_rgb
from tread.errors import ConfigError, DataError, check_int
from tread.files import atomic_write, files_below, regular
from tread.words import counted

GRID = "grid.png"
IMAGES_KEY = "arr_0"


class MixedSizes(DataError):
    """Images of several sizes, which one array cannot hold."""


class ImageSource(ABC):
    """`len(source)` images; `source.read(first, stop)` gives some of them, uint8 (H, W, 3) each."""

    read_ahead = True
    """Whether `read` may run in another thread."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, first: int, stop: int) -> list[np.ndarray]: ...

    @abstractmethod
    def identity(self) -> str:
        """A string that changes if the images may have changed."""


class ArrayImages(ImageSource):
    """Images in memory: uint8 (N, H, W, 3 or 1)."""

    def __init__(self, images: np.ndarray) -> None:
        self.images = np.broadcast_to(images, (*images.shape[:3], 3))  # grey becomes RGB

    def __len__(self) -> int:
        return self.images.shape[0]

    def read(self, first: int, stop: int) -> list[np.ndarray]:
        return list(self.images[first:stop])

    def identity(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.images).tobytes()).hexdigest()


class FirstImages(ImageSource):
    """The first `count` images of another source."""

    def __init__(self, source: ImageSource, count: int) -> None:
        self.source, self.count = source, check_int(count, "--count", 2)
        if count > len(source):
            available = counted(len(source), "image")
            raise ConfigError(f"--count is {count}, but SAMPLES has {available}; lower it or leave it out.")
        self.read_ahead = source.read_ahead

    def __len__(self) -> int:
        return self.count

    def read(self, first: int, stop: int) -> list[np.ndarray]:
        return self.source.read(first, min(stop, self.count))

    def identity(self) -> str:
        return f"first {self.count} of {self.source.identity()}"


class FileImages(ImageSource):
    """Images read in threads, `read_one(item)` for each of `items`; `paths` are the files that hold them."""

    def __init__(self, paths: list[Path], items: Sequence[Any], read_one: Callable[[Any], np.ndarray]) -> None:
        self.paths, self.items, self.read_one = paths, items, read_one

    def __len__(self) -> int:
        return len(self.items)

    def read(self, first: int, stop: int) -> list[np.ndarray]:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return list(pool.map(self.read_one, self.items[first:stop]))

    def identity(self) -> str:
        return _identity(self.paths)


class FolderImages(FileImages):
    """Every image below a folder."""

    def __init__(self, path: Path) -> None:
        files = [file for file in files_below(path) if _is_sample(file.relative_to(path))]
        if not files:
            raise DataError(f"no images ({' '.join(SUFFIXES)}) and no tars in {path}: name a folder that has some")
        super().__init__(files, files, _read_file)


class TarImages(FileImages):
    """The images in tars, in the order of the files; other members are ignored."""

    def __init__(self, paths: list[Path]) -> None:
        members: list[tuple[Path, str, int, int]] = []
        for path in paths:
            with reading(path), tarfile.open(regular(path), "r:") as tar:  # uncompressed: members are read by offset
                found = [member for member in tar if member.isfile() and _is_sample(Path(member.name))]
            members += [(path, member.name, member.offset_data, member.size) for member in found]
        if not members:
            raise DataError(f"no images ({' '.join(SUFFIXES)}) in {paths[0]}: name a tar of images, not of latents")
        super().__init__(paths, members, _read_member)


class BatchImages(ImageSource):
    """`arr_0` of an ADM reference or sample batch: uint8 (N, H, W, 3)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            self._archive = zipfile.ZipFile(regular(path))
            if f"{IMAGES_KEY}.npy" not in self._archive.namelist():
                raise DataError(f"{path} holds no images: they must be there as {IMAGES_KEY}, uint8 (N, H, W, 3)")
            self._file = self._archive.open(f"{IMAGES_KEY}.npy")
            version = np.lib.format.read_magic(self._file)
            read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
            self.shape, fortran, dtype = read_header(self._file)
            self._first_pixel = self._file.tell()
        if dtype != np.uint8 or len(self.shape) != 4 or self.shape[3] != 3 or 0 in self.shape[1:]:
            raise DataError(
                f"{IMAGES_KEY} in {path} is {dtype} of shape {self.shape}; it must hold images, uint8 (N, H, W, 3)"
            )
        if fortran:
            raise DataError(f"{IMAGES_KEY} in {path} is in Fortran order; save it in C order")

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, first: int, stop: int) -> list[np.ndarray]:
        stop = min(stop, len(self))
        size = int(np.prod(self.shape[1:]))
        with reading(self.path):
            self._file.seek(self._first_pixel + first * size)
            data = self._file.read((stop - first) * size)
        if len(data) != (stop - first) * size:
            raise DataError(f"{self.path} ends before image {stop}: copy or write it again")
        return list(np.frombuffer(data, np.uint8).reshape(-1, *self.shape[1:]))  # (H, W, 3) each

    def identity(self) -> str:
        return _identity([self.path])


def open_images(path: Path, count: int | None = None) -> ImageSource:
    """The first `count` images, or all, of a folder of images or tars, a tar, or an `.npz`."""
    if count is not None:
        return FirstImages(open_images(path), count)
    if path.is_dir():
        tars = sorted(path.glob("*.tar"))
        return TarImages(tars) if tars else FolderImages(path)
    if not path.exists():
        raise DataError(f"there is nothing at {path}; name a folder of images, a .tar or an .npz")
    if path.suffix == ".tar":
        return TarImages([path])
    if path.suffix == ".npz":
        return BatchImages(path)
    raise DataError(f"{path} is neither a folder, a .tar nor an .npz: put images in a folder, unpack a compressed tar")


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an `.npz` other than its images; empty for any other path."""
    if path.suffix != ".npz" or not path.is_file():
        return {}
    with reading(path), zipfile.ZipFile(path):  # np.load advises to unpickle what is no zip file
        pass
    with reading(path), np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files if not name.startswith("arr_")}


def has_images(path: Path) -> bool:
    """Whether a path holds images, not just statistics."""
    if path.suffix != ".npz" or not path.is_file():
        return True
    with reading(path), zipfile.ZipFile(path) as archive:
        return f"{IMAGES_KEY}.npy" in archive.namelist()


def write_batch(path: Path, source: ImageSource, arrays: Mapping[str, np.ndarray], *, batch_size: int = 256) -> None:
    """Write an ADM reference batch: the images as `arr_0`, and `arrays` (mu, sigma, mu_s, sigma_s).

    Raises `MixedSizes` and writes nothing if the images have several sizes.
    """
    with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
        with archive.open(f"{IMAGES_KEY}.npy", "w", force_zip64=True) as member:
            shape = source.read(0, 1)[0].shape
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(source), *shape)}
            np.lib.format.write_array_header_1_0(member, header)
            for first in range(0, len(source), batch_size):
                for index, image in enumerate(source.read(first, first + batch_size), first):
                    if image.shape != shape:
                        raise MixedSizes(
                            f"image {index} has {image.shape[1]} x {image.shape[0]} pixels and the first "
                            f"{shape[1]} x {shape[0]}; a batch file holds images of one size"
                        )
                    member.write(image.tobytes())
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _is_sample(path: Path) -> bool:
    """Whether a path, relative to the folder or tar, is a sample: an image, not hidden, not `grid.png`."""
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix.lower() in SUFFIXES and path.name != GRID and not hidden


def _read_file(path: Path) -> np.ndarray:
    with reading(path), Image.open(regular(path)) as image:
        return np.asarray(upright_rgb(image))  # (H, W, 3)


def _read_member(member: tuple[Path, str, int, int]) -> np.ndarray:
    path, name, offset, size = member
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(size)
    with reading(path / name), Image.open(io.BytesIO(data)) as image:
        return np.asarray(upright_rgb(image))  # (H, W, 3)


def _identity(paths: list[Path]) -> str:
    facts: list[str] = []
    for path in paths:
        with reading(path):
            stat = path.stat()
        facts.append(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(facts).encode(errors="surrogateescape")).hexdigest()
