"""`items_of`: the cache items of each sample: its latents, those of its references, and its loss weights.

- A key is a hash of everything that an item depends on: the content of the file, the crop and the encoder.
- A reference with its sample's aspect ratio shares the sample's crop, so that the pair stays aligned; any other has a
  bucket of its own. If the stock pipeline scales references by itself, their buckets have its area.
- The text encoder of some models sees the references too, or the first frame of a clip: the same crops, at the size of
  their buckets.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from PIL import Image

from tread.data.captioned.buckets import Bucket, Crop, Size, bucket_of, crop_of
from tread.data.captioned.entries import DataConfig
from tread.data.captioned.finding import Skipped
from tread.data.captioned.pixels import probe, read_pixels
from tread.data.captioned.samples import Sample
from tread.data.captioned.tables import Media
from tread.finetune.data.cache import FORMAT, Cache, Entry
from tread.finetune.data.hashes import digest

Sees = Literal["references", "first frame"] | None
"""The images of a sample that the text encoder sees beside its caption."""


@dataclass(frozen=True)
class Picture:
    """An image or video to encode, cropped, and the key of its item."""

    key: str
    media: Media
    crop: Crop
    sound: tuple[float, int] | None = None
    """Seconds of sound to encode with a clip, and the sampling rate; None: no sound."""
    alpha: bool = False
    """Whether its transparency is encoded."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The image, clip and sound sizes that a family takes."""

    multiple: int
    """Sides are multiples of this many pixels."""
    frame_factor: int = 1
    """Frames are 1 + a multiple of this."""
    references: tuple[int, int] | None = None
    """(area in pixels, multiple of the sides) of references; None: as the data's."""
    fills: bool = False
    """Whether a reference has its sample's size."""
    sound: tuple[float, int] | None = None
    """Frame rate of clips, and sampling rate of their sound; None: sound is not encoded."""
    alpha: bool = False
    """Whether transparency is encoded; otherwise images are composed over white."""


@dataclass(frozen=True)
class Items:
    """The entries of all samples, in order, and the pictures to encode for them."""

    entries: list[Entry | Skipped] = field(default_factory=list)
    pictures: dict[str, Picture] = field(default_factory=dict)
    """Pictures to encode, by the key of their latents."""
    seen: dict[str, Picture] = field(default_factory=dict)
    """Pictures that the text encoder sees, by their key."""

    @property
    def readable(self) -> list[Entry]:
        """The entries that were not skipped."""
        return [entry for entry in self.entries if isinstance(entry, Entry)]

    def seen_captions(self) -> Iterator[tuple[str, list[Picture]]]:
        """Every caption, and the empty one of each sample, with the pictures that the text encoder sees beside it."""
        for entry in [side for both in self.readable for side in both.sides]:
            pictures = [self.seen[key] for key in entry.seen]
            yield from ((caption, pictures) for caption in (*entry.sample.captions, ""))


def items_of(
    cache: Cache,
    samples: Sequence[Sample],
    configs: Sequence[DataConfig],
    *,
    identity: str,
    shapes: Shapes,
    seen: Sees = None,
    progress: bool = True,
) -> Items:
    """The items of the samples; `identity` names the encoder (`hashes.identity`), `seen` what its text encoder sees.

    All processes call it together with the same samples and get the same result.
    """
    files = [media for s in samples for media in (s.media, s.mask, *s.references) if media is not None]
    contents = cache.hashes.of(files, progress=progress and cache.is_main)
    items = Items()
    for sample in samples:
        needed = (media for media in (sample.media, sample.mask, *sample.references) if media is not None)
        unread = next((media for media in needed if media not in contents), None)
        if unread is not None:
            items.entries.append(Skipped(str(sample.media), f"{unread} cannot be read"))
            continue
        config = configs[sample.dataset]
        mirrored = bool(config.horizontal_flip) and not sample.held_out
        entry, *others = (
            _of_sample(sample, config, contents, identity, shapes, items, seen=seen, mirrored=side)
            for side in ([False, True] if mirrored else [False])
        )
        items.entries.append(replace(entry, mirrored=others[0]) if others else entry)
    return items


def _of_sample(
    sample: Sample,
    config: DataConfig,
    contents: Mapping[Media, str],
    identity: str,
    shapes: Shapes,
    items: Items,
    *,
    seen: Sees,
    mirrored: bool,
) -> Entry:
    """The entry of a sample; the pictures to encode for it, and those that the text encoder sees, go to `items`."""

    def picture(media: Media, crop: Crop, sound: tuple[float, int] | None = None) -> Picture:
        crop = replace(crop, mirrored=mirrored)
        # the last word is for other samples: before it, gaps between packets were clicks
        words = () if sound is None else (*sound, "joined")
        made = Picture(digest(FORMAT, contents[media], crop, identity, *words), media, crop, sound, shapes.alpha)
        return items.pictures.setdefault(made.key, made)

    bucket = bucket_of(sample.size, config, shapes.multiple, frames=sample.frames, frame_factor=shapes.frame_factor)
    crop = crop_of(sample.size, bucket, config, contents[sample.media])
    sound = None if shapes.sound is None else (bucket.frames / shapes.sound[0], shapes.sound[1])
    image = picture(sample.media, crop, sound)
    references = [
        picture(media, _reference_crop(sample, size, crop, contents[media], contents[sample.media], config, shapes))
        for media, size in zip(sample.references, sample.reference_sizes, strict=True)
    ]
    shown: list[Picture] = []
    if seen is not None:
        shown = [_still(image)] if seen == "first frame" else references
        shown = [replace(one, key=digest(FORMAT, contents[one.media], one.crop)) for one in shown]
        items.seen.update((one.key, one) for one in shown)
    return Entry(
        sample=sample,
        bucket=bucket,
        latents=image.key,
        weight=None if sample.mask is None else digest(FORMAT, contents[sample.mask], sample.mask_kind, image.key),
        references=tuple(reference.key for reference in references),
        reference_buckets=tuple(reference.crop.bucket for reference in references),
        seen=tuple(one.key for one in shown),
        loss_weight=config.loss_weight,
    )


def _still(picture: Picture) -> Picture:
    """The first frame of a clip."""
    bucket = picture.crop.bucket
    return replace(picture, crop=replace(picture.crop, bucket=Bucket(bucket.width, bucket.height), frame_rate=None))


def _reference_crop(
    sample: Sample, size: Size, crop: Crop, content: str, target: str, config: DataConfig, shapes: Shapes
) -> Crop:
    """The crop of a reference of this size; `content` and `target` are the digests of it and of its sample."""
    aligned = sample.size[0] * size[1] == sample.size[1] * size[0]
    if shapes.fills and not aligned:
        return crop_of(size, Bucket(crop.bucket.width, crop.bucket.height), config, content)
    scaled, multiple = _reference_config(config, shapes)
    if aligned and scaled is config:
        return replace(crop, bucket=Bucket(crop.bucket.width, crop.bucket.height), frame_rate=None)
    # hashed by the sample: a random crop of an aligned reference matches the sample's, up to bucket rounding
    return crop_of(size, bucket_of(size, scaled, multiple), scaled, target if aligned else content)


def _reference_config(config: DataConfig, shapes: Shapes) -> tuple[DataConfig, int]:
    """The data settings for references, and the multiple of their sides."""
    area, multiple = shapes.references or (None, shapes.multiple)
    if config.reference_resolution is not None and not shapes.fills:
        return replace(config, resolution=config.reference_resolution), multiple
    if area is None:
        return config, multiple
    # these two are in the unit of the entry's resolution_type
    free = {"maximum_image_size": None, "target_downsample_size": None}
    return replace(config, resolution=math.sqrt(area), resolution_type="pixel_area", **free), multiple


def whole(cache: Cache, paths: Sequence[str]) -> list[Picture]:
    """Image files as pictures that are not cropped; all processes call it together."""
    files = [Path(path) for path in paths]
    contents = cache.hashes.of(files, progress=False)
    crops = [Crop(Bucket(*probe(media)[:2]), 0.0, 0.0, 1.0, 1.0) for media in files]
    return [Picture(digest(FORMAT, contents[p], crop), p, crop) for p, crop in zip(files, crops, strict=True)]


def read_image(picture: Picture) -> Image.Image:
    """The pixels of a picture as a Pillow image."""
    return Image.fromarray(read_pixels(picture.media, picture.crop)[0].numpy())
