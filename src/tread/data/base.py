"""What every dataset shares: the interface, the error for bad data, preview pixels, whole files.

- `Dataset` is torch's map-style dataset and three members more. It holds no code: the datasets have an
  interface in common and nothing else.
- Bad data is not a bad setting: `DataError` says what was found, where, and what to do, in one sentence.
  A DataLoader worker hands its error over as a printed traceback; `DataError` keeps the sentence alone.
- A file written here is either whole or absent: a temporary name beside it, fsync, rename. `opens` tells whether a file
  of tensors that came from elsewhere is whole.
"""

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class DataError(ValueError):
    """The data is bad. The message is one sentence: what was found, where, and what to do."""

    def __init__(self, message: str) -> None:
        if message.startswith("Caught ") and "Original Traceback" in message:  # torch's ExceptionWrapper
            message = message.rstrip().rsplit("\n", 1)[-1].partition(": ")[2]
        super().__init__(message.replace("\n", " "))  # a decoder's reason may have several lines


class Dataset(torch.utils.data.Dataset[tuple[Tensor, int]], ABC):
    """A map from an index to one sample, and the random part of reading it, batched and stateless."""

    shape: tuple[int, int, int]
    """(C, H, W) of what the model sees, after `prepare`."""
    num_classes: int
    """Labels are 0..num_classes-1."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One sample, float32, and its label; the same every time."""

    @abstractmethod
    def prepare(self, x: Tensor, seed: int, positions: Tensor) -> Tensor:
        """(B, ...) as collated -> (B, C, H, W) on x's device; random only by `seed` and `positions` (B,)."""

    @staticmethod
    @abstractmethod
    def to_images(x: Tensor) -> Tensor:
        """(B, C, H, W) as the model sees it -> uint8 (B, H, W, 3 or 1) for a preview."""


def to_uint8(x: Tensor) -> Tensor:
    """Pixels in [-1, 1], (B, C, H, W) -> uint8 (B, H, W, C); values outside are clipped."""
    pixels = ((x.float().clamp(-1, 1) + 1) * 127.5).round()
    return pixels.to(torch.uint8).permute(0, 2, 3, 1).contiguous()  # (B, H, W, C)


def opens(path: Path) -> bool:
    """Whether a safetensors file is there and as long as its header says; its values are not read."""
    with suppress(OSError, SafetensorError), safe_open(path, framework="pt"):
        return True
    return False


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` only when it is complete and on the disk."""
    # The unique name lets several processes write the same file at once; the last to finish wins.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the rename itself lives in the folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
