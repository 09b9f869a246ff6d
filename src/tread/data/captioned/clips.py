"""Video clips: their size and their frames, by PyAV.

- A clip is read from its start, frame by frame, at its own rate: the first F frames, none left out and none repeated.
- Frames are turned upright by the rotation that phones write beside them.
- The number of frames is what the container says, or counted where it says nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm")

_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


def probe_clip(path: Path) -> tuple[int, int, int]:
    """Width and height as shown, and the number of frames."""
    first = next(read_clip(path), None)
    if first is None:
        raise ValueError("it has no frames")
    with _open(path) as container:
        stream = container.streams.video[0]
        frames = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
    return *first.size, frames


def read_clip(path: Path) -> Iterator[Image.Image]:
    """The frames of a clip in RGB, upright, decoded one by one."""
    with _open(path) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        for frame in container.decode(container.streams.video[0]):
            image = frame.to_image()
            turn = _TURNS.get(round(frame.rotation) % 360)
            yield image if turn is None else image.transpose(turn)


def _open(path: Path) -> Any:
    try:
        import av
    except ImportError as error:
        raise ImportError("reading clips needs PyAV: pip install 'tread-diffusion[data]'") from error
    return av.open(str(path))
