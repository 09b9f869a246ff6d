"""The sound of video clips, read with PyAV: whether a clip has an audio stream, and its samples.

- Sound is aligned with the picture: samples before the first frame are cut, and gaps at either end are silence. Packets
  follow each other without gaps of the container's rounding, which would be clicks.
- It is resampled to one rate and stereo: mono is copied to both channels, more than two channels are mixed down.
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tread.data.captioned.clips import TIME_ERROR, open_clip, rate_of
from tread.data.captioned.pixels import is_clip
from tread.data.captioned.tables import Media
from tread.data.images import reading


def has_sound(media: Media) -> bool:
    """Whether a sample is a clip with a sound track."""
    if not isinstance(media, Path) or not is_clip(media):
        return False
    with reading(media), open_clip(media) as container:
        return bool(container.streams.audio)


def clip_rate(media: Path) -> float:
    """Frames per second of a clip, on average."""
    with reading(media), open_clip(media) as container:
        return float(rate_of(container))


def read_sound(media: Media, seconds: float, rate: int) -> Tensor:
    """The sound of a clip's first seconds at `rate` samples per second: (2, N) float32 in [-1, 1]."""
    assert isinstance(media, Path)
    out = torch.zeros(2, round(seconds * rate))
    with reading(media):
        start = _first_time(media)
        with open_clip(media) as container:
            stream = container.streams.audio[0]
            resampler = _resampler("mono" if stream.channels == 1 else "stereo", rate)
            following = 0
            for frame in itertools.chain(container.decode(stream), [None]):  # None flushes the resampler
                for part in resampler.resample(frame):
                    samples = torch.from_numpy(part.to_ndarray())  # (1 or 2, n)
                    at = following if part.time is None else round((part.time - start) * rate)
                    if abs(at - following) < TIME_ERROR * rate:  # no gap, but a time that the container has rounded
                        at = following
                    following = at + samples.shape[1]
                    first, last = max(at, 0), min(following, out.shape[1])
                    if first < last:
                        out[:, first:last] = samples[:, first - at : last - at]
                if following >= out.shape[1]:
                    break
    return out


def _first_time(path: Path) -> float:
    """The presentation time of the first frame, in seconds."""
    with open_clip(path) as container:
        return next(container.decode(container.streams.video[0])).time or 0.0


def _resampler(layout: str, rate: int) -> Any:
    import av

    return av.AudioResampler(format="fltp", layout=layout, rate=rate)
