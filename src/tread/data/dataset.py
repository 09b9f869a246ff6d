"""The interface of datasets, and pixels for previews.

`Dataset` is torch's map-style dataset with a few more members.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tread.data.order import Groups


class Dataset(torch.utils.data.Dataset[tuple[Tensor, int]], ABC):
    """A map from an index to one sample; `prepare` is the random part, batched and stateless."""

    shape: tuple[int, int, int]
    """(C, H, W) of what the model sees, after `prepare`."""
    num_classes: int
    """Labels are 0..num_classes-1."""
    classes: Sequence[str] = ()
    """The names of the classes, in the order of their labels; empty if they have none."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """One float32 sample and its label; deterministic."""

    @abstractmethod
    def prepare(self, x: Tensor, seed: int, positions: Tensor) -> Tensor:
        """(B, ...) as collated -> (B, C, H, W) on x's device; a pure function of x, `seed` and `positions` (B,).

        The positions are global (`order.positions`): neither device, number of processes nor a resume changes them.
        """

    def doubt(self) -> str | None:
        """A warning about data that looks wrong, with the setting to change; None if all looks right."""
        return None

    def contents(self) -> Mapping[str, Iterable[object]]:
        """The names and sizes of the files of each class or shard, which a resume compares; empty to compare none."""
        return {}

    def groups(self) -> Groups | None:
        """The groups that are read window by window; None shuffles all samples together."""
        return None

    def coming(self, groups: Sequence[int]) -> None:
        """Prefetch `groups`, those of the next window; called while the current one is read."""
        return

    @staticmethod
    @abstractmethod
    def to_images(x: Tensor) -> Tensor:
        """(B, C, H, W) as the model sees it -> uint8 (B, H, W, 3 or 1) for a preview."""


def to_uint8(x: Tensor) -> Tensor:
    """Pixels in [-1, 1], (B, C, H, W) -> uint8 (B, H, W, C); values outside are clipped."""
    pixels = ((x.float().clamp(-1, 1) + 1) * 127.5).round()
    return pixels.to(torch.uint8).permute(0, 2, 3, 1).contiguous()  # (B, H, W, C)
