"""The pixels of one sample in its bucket, from an image, an animation or a clip.

- Rotated by EXIF or the container's tag, RGB, transparency over white unless it is asked for, as in `images.py`.
- Scaling and cropping are one resampling with Pillow's antialiased bicubic filter.
- An animation (GIF, WebP, PNG) is a clip if the bucket has several frames, else its first frame.
- A file that cannot be read raises a DataError that names it.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from tread.data import images
from tread.data.captioned import clips
from tread.data.captioned.buckets import Crop
from tread.data.captioned.tables import Media, opened
from tread.data.images import reading

_ANIMATED = ("GIF", "PNG", "WEBP")
_ORIENTATION = 0x0112


def is_image(path: Path) -> bool:
    """Whether the suffix is an image's; animations count as images."""
    return path.suffix.lower() in images.SUFFIXES


def is_clip(path: Path) -> bool:
    """Whether the suffix is a video container's."""
    return path.suffix.lower() in clips.SUFFIXES


def probe(media: Media) -> tuple[int, int, int]:
    """Width and height as shown, and the number of frames; images are not decoded."""
    with reading(media):
        if isinstance(media, Path) and is_clip(media):
            return clips.probe_clip(media)
        with Image.open(opened(media)) as image:
            width, height = image.size
            # the base class's method: PNG's override decodes the whole picture to find a tag after it
            if Image.Image.getexif(image).get(_ORIENTATION, 1) >= 5:  # these orientations swap the sides
                width, height = height, width
            # in other formats, n_frames counts thumbnails or pages
            return width, height, getattr(image, "n_frames", 1) if image.format in _ANIMATED else 1


def count_frames(media: Media, rate: float) -> int:
    """The number of frames of a clip or an animation resampled to `rate` frames per second."""
    with reading(media):
        if isinstance(media, Path) and is_clip(media):
            return clips.resampled_count(clips.clip_seconds(media), rate)
        with Image.open(opened(media)) as image:
            return clips.resampled_count(sum(_seconds(frame) for frame in ImageSequence.Iterator(image)), rate)


def read_pixels(media: Media, crop: Crop, *, alpha: bool = False) -> Tensor:
    """The picture in its bucket: uint8 (F, H, W, 3), or (F, H, W, 4) with its transparency."""
    bucket = crop.bucket
    frames: list[np.ndarray] = []
    with reading(media):
        timed = _timed(media, alpha=alpha)
        frames_read = (
            (frame for frame, _, _ in timed) if crop.frame_rate is None else clips.resampled(timed, crop.frame_rate)
        )
        for frame in itertools.islice(frames_read, bucket.frames):
            left, top, right, bottom = box = crop.box(frame.size)
            if not math.isclose((right - left) * bucket.height, (bottom - top) * bucket.width, rel_tol=1e-3):
                raise ValueError(f"its {frame.width}x{frame.height} pixels have another shape than its header says")
            fitted = frame.resize((bucket.width, bucket.height), Image.Resampling.BICUBIC, box=box)
            fitted = fitted.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.mirrored else fitted
            frames.append(np.asarray(fitted))  # (H, W, 3 or 4)
        if len(frames) < bucket.frames:
            raise ValueError(f"it ends after {len(frames)} of {bucket.frames} frames")
    return torch.from_numpy(np.stack(frames))  # (F, H, W, 3 or 4)


def _timed(media: Media, *, alpha: bool) -> Iterator[clips.Timed]:
    """The frames of an image, animation or clip with their times; a clip has no transparency."""
    if isinstance(media, Path) and is_clip(media):
        yield from clips.timed_clip(media)
        return
    start = 0.0
    with Image.open(opened(media)) as image:
        for frame in ImageSequence.Iterator(image):
            yield images.upright_rgba(frame) if alpha else images.upright_rgb(frame), start, _seconds(frame)
            start += _seconds(frame)


def _seconds(frame: Image.Image) -> float:
    """The duration of an animation's frame in seconds; 0.1 without one, as in browsers."""
    return (frame.info.get("duration") or 100) / 1000
