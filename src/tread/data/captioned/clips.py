"""Video clips, read with PyAV: size, duration and frames.

- A clip is read from its start, at its own frame rate or at another one (`resampled`).
- Frames are rotated by the container's rotation tag, as phones write it.
"""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from PIL import Image

from tread.errors import needs
from tread.files import regular

_ROUNDING = 1e-3
"""Tolerance of a time, in frames: containers round times to a time base of their own."""
TIME_ERROR = 2e-3
"""Seconds by which a time after the first frame may be off: Matroska rounds both to milliseconds."""
SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")

_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


def probe_clip(path: Path) -> tuple[int, int, int]:
    """Width and height as shown, and the number of frames."""
    first = next(timed_clip(path), None)
    if first is None:
        raise ValueError("it has no frames")
    with open_clip(path) as container:
        return *first[0].size, _frames(container)


def clip_seconds(path: Path) -> float:
    """The duration of a clip: its frames at its average rate."""
    with open_clip(path) as container:
        return float(_frames(container) / rate_of(container))


def _frames(container: Any) -> int:
    """The number of frames: the container's, or counted if it has none."""
    stream = container.streams.video[0]
    return stream.frames or sum(1 for packet in container.demux(stream) if packet.size)


def rate_of(container: Any) -> Fraction:
    """Frames per second of a clip, on average."""
    rate = container.streams.video[0].average_rate
    if not rate:
        raise ValueError("it has no frame rate")
    return rate


Timed = tuple[Image.Image, float | None, float | None]
"""A frame, its start after the first one and its duration in seconds; None where the file has none."""


def timed_clip(path: Path) -> Iterator[Timed]:
    """The frames of a clip, RGB and upright, decoded lazily, with their times."""
    with open_clip(path) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        stream, first = container.streams.video[0], None
        for frame in container.decode(stream):
            image = frame.to_image()
            turn = _TURNS.get(round(frame.rotation) % 360)
            first = frame.time if first is None else first
            time = None if frame.time is None else _unrounded(frame.time - first, stream.average_rate)
            yield image if turn is None else image.transpose(turn), time, None


def _unrounded(seconds: float, rate: Fraction | None) -> float:
    """A time that the container has rounded, at a whole number of frames if it is near one.

    At a constant rate this is the time before rounding; else it is off by less than the rounding itself.
    """
    exact = float(round(seconds * rate) / rate) if rate else seconds
    return exact if abs(exact - seconds) < TIME_ERROR else seconds


def resampled(frames: Iterable[Timed], rate: float) -> Iterator[Image.Image]:
    """Resample frames to another rate: the k-th is the one shown k / rate seconds after the first.

    A last frame without a duration is shown as long as the one before it.

    >>> [*resampled([("a", 0.0, None), ("b", 0.5, None)], 4.0)]
    ['a', 'a', 'b', 'b']
    """
    shown: Image.Image | None = None
    start, gap, count = 0.0, 1 / rate, 0
    for image, time, seconds in frames:
        if time is None:
            raise ValueError("its frames have no times, so its frame rate cannot be changed")
        while shown is not None and (count + _ROUNDING) / rate < time:
            yield shown
            count += 1
        gap = seconds or (time - start if time > start else gap)
        shown, start = image, time
    while shown is not None and (count + _ROUNDING) / rate < start + gap:
        yield shown
        count += 1


def resampled_count(seconds: float, rate: float) -> int:
    """The number of frames that `resampled` makes of a clip of this duration, at least 1, whatever its rounding."""
    return max(1, math.ceil((seconds - TIME_ERROR) * rate - _ROUNDING))


def open_clip(path: Path) -> Any:
    """The container of a clip, as PyAV opens it."""
    with needs("reading clips needs PyAV", "data"):
        import av
    return av.open(str(regular(path)))
