"""A folder of images for training on pixels: the subfolder is the class.

- Classes are the subfolders in sorted order; a folder without subfolders is one class. Files are sorted
  too, so that an index refers to the same image on every machine and in `tread encode`. Links to folders are followed.
- An image is cropped to the largest centred square and resized with Pillow's antialiased bicubic filter, rotated
  by its EXIF tag, with transparency over white; 16-bit grey is scaled, not clipped.
- A file that cannot be read raises an error that names it; `tread train` and `tread encode` list such files and go on.
- The flip is drawn in `prepare`, from the sample's position, on the training device.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from tread.data.dataset import Dataset, to_uint8
from tread.errors import ConfigError, DataError, one_line
from tread.files import regular, visible
from tread.routing import noise
from tread.words import counted

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

_FLIP_WORD = int.from_bytes(b"flip")


class ImageFolder(Dataset):
    """`ImageFolder(path, size=64)[i]` is (3, size, size) in [-1, 1] and the class of its subfolder."""

    def __init__(
        self,
        path: Annotated[str | Path, "the folder: one subfolder of images per class"],
        *,
        size: Annotated[int, "pixels, square: images are resized and centre-cropped"] = 64,
        flip: Annotated[bool, "mirror half of the images"] = True,
    ) -> None:
        if size < 1:
            raise ConfigError(f"data.size is {size}; it must be at least 1 pixel")
        self.path = Path(path)
        self.files, self.labels, self.classes = list_images(self.path)
        self.num_classes = len(self.classes)
        self.shape = (3, size, size)
        self.flip = flip

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = read_image(self.path / self.files[index], self.shape[-1])
        x = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()  # (3, H, W)
        return x.float() / 127.5 - 1, self.labels[index]

    def prepare(self, x: Tensor, seed: int, positions: Tensor) -> Tensor:
        if not self.flip:
            return x
        mirrored = noise.bits(seed, _FLIP_WORD, positions.to(x.device)) & 1 == 1
        return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)

    def contents(self) -> Mapping[str, Iterable[object]]:
        groups: dict[str, list[str]] = {name: [] for name in self.classes}
        for file, label in zip(self.files, self.labels, strict=True):
            groups[self.classes[label]].append(f"{file} {_size(self.path / file)}")
        return groups

    @staticmethod
    def to_images(x: Tensor) -> Tensor:
        return to_uint8(x)


def list_images(path: Path) -> tuple[list[str], list[int], list[str]]:
    """The image files below `path`, relative to it, class by class; their labels; the class names.

    Hidden files and folders, and files whose suffix is not in SUFFIXES, are ignored.
    """
    if not path.is_dir():
        raise ConfigError(f"no image folder at {path}: set the path to a folder of images or of class folders")
    entries = sorted(entry for entry in os.listdir(path) if not entry.startswith("."))
    classes = [entry for entry in entries if (path / entry).is_dir()]
    loose = sorted({entry for entry in entries if _is_image(entry)} - set(classes))
    for entry in entries:
        if not _is_image(entry) and not (path / entry).exists():
            raise DataError(
                f"{path / entry} is a link to nothing: restore the folder that it names, or remove the link"
            )
    if classes and loose:
        raise DataError(
            f"{path} has {counted(len(loose), 'image')} beside its class folders, the first is {loose[0]}: "
            "move them into a class folder or remove them"
        )
    files, labels = loose, [0] * len(loose)
    for label, name in enumerate(classes):
        in_class = _images_below(path, name)
        if not in_class:
            raise DataError(
                f"class folder {path / name} has no images ({' '.join(SUFFIXES)}): "
                "remove the folder or put images into it"
            )
        files += in_class
        labels += [label] * len(in_class)
    if not files:
        raise DataError(f"no images ({' '.join(SUFFIXES)}) in {path}: put images or class folders into it")
    return files, labels, classes or [path.resolve().name]


def read_image(path: Path, size: int) -> np.ndarray:
    """One image as uint8 (size, size, 3): upright, RGB, the largest centred square."""
    with reading(f"image {path}"), Image.open(regular(path)) as image:
        return np.array(ImageOps.fit(upright_rgb(image), (size, size), method=Image.Resampling.BICUBIC))  # (H, W, 3)


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn whatever a decoder raises on a broken file into a DataError that names it."""
    try:
        yield
    except (ImportError, DataError):
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"cannot read {what}, which has too many pixels ({one_line(error)}): scale it down") from error
    except Exception as error:  # OSError, SyntaxError, struct.error, FFmpeg's own, ...
        raise DataError(f"cannot read {what} ({one_line(error)}): remove it or save it again") from error


def upright_rgb(image: Image.Image) -> Image.Image:
    """The image rotated by its EXIF tag, in RGB, with transparency over white."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion clips everything above 255
        grey = np.asarray(image).clip(0, 65535) // 257  # (H, W)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def upright_rgba(image: Image.Image) -> Image.Image:
    """The image rotated by its EXIF tag, with its transparency; opaque if it has none."""
    if image.has_transparency_data and image.mode[0] not in "IF":
        return ImageOps.exif_transpose(image).convert("RGBA")
    return upright_rgb(image).convert("RGBA")


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _images_below(root: Path, name: str) -> list[str]:
    files: list[str] = []
    for folder, names in visible(root / name):
        below = folder.relative_to(root)
        files += [(below / n).as_posix() for n in names if _is_image(n)]
    return sorted(files)


def _size(path: Path) -> int | str:
    """The size of a file in bytes; a link to nothing is listed when it is read, like any file that cannot be."""
    try:
        return path.stat().st_size
    except OSError:
        return "unreadable"
