"""Aspect buckets: the sizes that samples are scaled to, and the order of batches of one size.

- Buckets have fixed aspect ratios from 1:4 to 4:1 at about constant area, sides rounded to a multiple that the model
  needs. Few shapes mean full batches and few compiled graphs; the ratios are those of cameras and screens, so little
  is cropped.
- A sample is scaled to cover its bucket and cropped, in one resampling. A `Crop` is a box in fractions of the picture,
  so that a mask of another size gets the same one.
- Random crops are a hash of the content: a file has one crop, and its cached latents stay valid.
- A crop also says whether the picture is mirrored, and at which frame rate a clip is read.
- The order of batches is a pure function of the batch's index, as in `order.py`. A batch has samples of one group
  only, such as a bucket. Every epoch visits every sample `repeats` times; a group's last batch is filled from the start
  of the group's permutation, so that no sample is dropped, nor repeated in a batch unless the group is too small.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tread.data.captioned.entries import DataConfig, ResolutionType
from tread.errors import ConfigError
from tread.routing import noise

RATIOS = ((1, 1), (9, 8), (5, 4), (4, 3), (3, 2), (8, 5), (16, 9), (2, 1), (12, 5), (3, 1), (4, 1))
"""Aspect ratios, longer to shorter side."""

_MEGAPIXEL = 1024 * 1024
_CROP_WORD, _ENTRY_WORD, _BATCH_WORD = (int.from_bytes(word) for word in (b"crop", b"entr", b"batc"))

Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True, order=True)
class Bucket:
    """A size of training samples, in pixels and frames."""

    width: int
    height: int
    frames: int = 1

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")


@dataclass(frozen=True)
class Crop:
    """The box of a picture that is resampled to its bucket, in fractions of the picture's sides."""

    bucket: Bucket
    left: float
    top: float
    right: float
    bottom: float
    mirrored: bool = False
    """Whether the crop is flipped horizontally."""
    frame_rate: float | None = None
    """Frames per second that a clip is read at; None keeps its own rate."""

    def box(self, size: Size) -> tuple[float, float, float, float]:
        """The box in pixels of a picture of this size."""
        width, height = size
        return self.left * width, self.top * height, self.right * width, self.bottom * height

    def __str__(self) -> str:
        # a word of cache keys, so other words for other frames: " at" was before times were rid of their rounding
        rate = "" if self.frame_rate is None else f" resampled to {self.frame_rate:g} fps"
        box = f"{self.left:.6f},{self.top:.6f},{self.right:.6f},{self.bottom:.6f}"
        return f"{self.bucket} of {box}{rate}{' mirrored' * self.mirrored}"


def measure(size: Size, unit: ResolutionType) -> float:
    """The size of a picture in the unit of `resolution`."""
    width, height = size
    if unit == "pixel":
        return min(width, height)
    return math.sqrt(width * height) if unit == "pixel_area" else width * height / _MEGAPIXEL


def bucket_of(size: Size, config: DataConfig, multiple: int, *, frames: int = 1, frame_factor: int = 1) -> Bucket:
    """The bucket of a picture: sides are multiples of `multiple`, frames are 1 + a multiple of `frame_factor`.

    >>> bucket_of((6000, 4000), DataConfig(instance_data_dir="photos", resolution=1024), 16)
    Bucket(width=1248, height=832, frames=1)
    """
    edge = config.resolution
    if config.resolution_type == "area":
        edge = math.sqrt(config.resolution * _MEGAPIXEL)
    ratio = 1.0
    if not (config.crop and config.crop_aspect == "square"):
        ratio = _nearest_ratio(size[0] / size[1])
    if config.resolution_type == "pixel":
        sides = edge * max(ratio, 1.0), edge * max(1 / ratio, 1.0)
    else:
        sides = edge * math.sqrt(ratio), edge / math.sqrt(ratio)
    width, height = (max(1, round(side / multiple)) * multiple for side in sides)
    count = min(frames, config.video.num_frames)
    return Bucket(width, height, 1 + (count - 1) // frame_factor * frame_factor)


def crop_of(size: Size, bucket: Bucket, config: DataConfig, content: str) -> Crop:
    """The crop of a picture for its bucket; `content` is the hex digest of its file."""
    width, height = size
    scale = cover = enlargement(size, bucket)
    target = config.target_downsample_size or config.maximum_image_size
    if config.crop and target:
        measured, unit = measure(size, config.resolution_type), config.resolution_type
        shrink = target / measured if unit != "area" else math.sqrt(target / measured)
        scale = max(cover, shrink if measured > (config.maximum_image_size or target) else 1.0)
    shares = min(1.0, bucket.width / scale / width), min(1.0, bucket.height / scale / height)
    left, top = (0.5 * (1 - share) for share in shares)
    if config.crop_style == "random":
        left, top = (
            float(noise.uniform(_CROP_WORD, int(content[:16], 16), axis)) * (1 - share)
            for axis, share in enumerate(shares)
        )
    rate = config.video.frame_rate if bucket.frames > 1 else None
    return Crop(bucket, left, top, min(1.0, left + shares[0]), min(1.0, top + shares[1]), frame_rate=rate)


def enlargement(size: Size, bucket: Bucket) -> float:
    """The scale at which a picture covers its bucket; above 1 if the picture is too small."""
    return max(bucket.width / size[0], bucket.height / size[1])


def _nearest_ratio(ratio: float) -> float:
    ratios = [long / short for long, short in RATIOS]
    return min([*ratios, *(1 / value for value in ratios)], key=lambda value: abs(math.log(value / ratio)))


class BucketOrder:
    """Maps the index of a batch to its samples, which all belong to one group.

    `groups[i]` is the group of sample i, `repeats[i]` how often an epoch visits it (0: never), `batch` the number of
    samples in a batch over all processes together.

    >>> order = BucketOrder(["wide", "tall", "wide"], [1, 1, 2], batch=2, seed=0)
    >>> order.batches
    3
    >>> {tuple(order.batch(index).tolist()) for index in range(3)} >= {(1, 1)}
    True
    """

    def __init__(self, groups: Sequence[Hashable], repeats: Sequence[int], *, batch: int, seed: int) -> None:
        if batch < 1:
            raise ConfigError(f"train_batch_size times the processes is {batch}; it must be at least 1.")
        members: dict[Hashable, list[int]] = {}
        for i, (group, count) in enumerate(zip(groups, repeats, strict=True)):
            members.setdefault(group, []).extend([i] * count)
        self._members = [torch.tensor(entries) for entries in members.values() if entries]  # (n_g,) each
        if not self._members:
            raise ConfigError("the order needs at least 1 sample to train on, there are 0.")
        self.size, self.seed = batch, seed
        counts = torch.tensor([math.ceil(len(entries) / batch) for entries in self._members])
        self._first = torch.cumsum(counts, 0) - counts  # (groups,): each group's first batch, before shuffling
        self.batches = int(counts.sum())
        """Batches per epoch."""
        self._epoch: tuple[int, Tensor, dict[int, Tensor]] | None = None

    def batch(self, index: int) -> Tensor:
        """The samples of the batch with this index, counted from the start of the run: (batch,) int64."""
        epoch, slot = divmod(index, self.batches)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, noise.permutation(self.batches, self.seed, _BATCH_WORD, epoch), {})
        _, shuffled, entries = self._epoch
        unshuffled = shuffled[slot]
        group = int(torch.searchsorted(self._first, unshuffled, right=True)) - 1
        if group not in entries:
            members = self._members[group]
            entries[group] = members[noise.permutation(len(members), self.seed, _ENTRY_WORD, epoch, group)]
        first = int(unshuffled - self._first[group]) * self.size
        return entries[group][torch.arange(first, first + self.size) % len(entries[group])]  # (batch,)
