"""Video clips: size and frames, by PyAV.

- A clip is read from its start at its own frame rate: the first F frames, none skipped or repeated.
- Frames are rotated by the container's rotation tag, as phones write it.
- The number of frames is the container's, or counted if it has none.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from tread.errors import needs
from tread.files import regular

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
    """The frames of a clip, RGB and upright, decoded lazily."""
    with _open(path) as container:
        if not container.streams.video:
            raise ValueError("it has no video stream")
        for frame in container.decode(container.streams.video[0]):
            image = frame.to_image()
            turn = _TURNS.get(round(frame.rotation) % 360)
            yield image if turn is None else image.transpose(turn)


def _open(path: Path) -> Any:
    with needs("reading clips needs PyAV", "data"):
        import av
    return av.open(str(regular(path)))
