"""The pictures of a run over time: sample grids of pretraining, previews of fine-tuning, as data URIs.

To keep the page from growing to hundreds of megabytes, long runs show some steps, evenly spread, and large pictures are
scaled down and stored as WebP. Files that cannot be opened are left out.
"""

import base64
import io
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from PIL import Image

from tread.page.read import Run

MOST = 48
"""Most pictures of one run."""
FEWEST = 6
"""Steps shown of one run at least, however many prompts it has."""
SIDE = 768
"""Longest side of a picture in pixels."""
AS_IT_IS = 64 * 1024
"""Bytes up to which a PNG is stored unchanged."""
SAMPLES, PREVIEWS = re.compile(r"step-(\d+)\.png"), re.compile(r"step-(\d+)-(\d+)\.png")
T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """One picture: its data URI, its size and what it shows."""

    uri: str
    width: int
    height: int
    caption: str = ""


def picture_files(run: Run) -> dict[int, list[Path]]:
    """The picture files of each step, in the order of the prompts."""
    folder, pattern = (
        (run.path / "previews", PREVIEWS) if run.kind == "fine-tuning" else (run.path / "samples", SAMPLES)
    )
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.glob("step-*.png"):
        if match := pattern.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append((int(match[2]) if len(match.groups()) > 1 else 0, path))
    return {step: [path for _, path in sorted(found[step])] for step in sorted(found)}


def frames(run: Run) -> tuple[dict[int, list[Picture]], int]:
    """The pictures of the steps shown, and the number of steps that have pictures."""
    files = picture_files(run)
    most = max((len(paths) for paths in files.values()), default=1)
    prompts = run.settings.get("validation_prompt") if run.kind == "fine-tuning" else None
    captions = prompts if isinstance(prompts, list) else [prompts or ""]
    shown: dict[int, list[Picture]] = {}
    for step in spread(list(files), max(FEWEST, MOST // most)):
        pictures = []
        for index, path in enumerate(files[step]):
            with suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError):
                caption = str(captions[index]) if index < len(captions) else ""
                pictures.append(embedded(path, caption))
        if pictures:
            shown[step] = pictures
    return shown, len(files)


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spread, including the first and the last.

    >>> spread(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def embedded(path: Path, caption: str = "") -> Picture:
    """A picture file for the page."""
    with Image.open(path) as image:
        if image.format == "PNG" and path.stat().st_size <= AS_IT_IS and max(image.size) <= 2 * SIDE:
            image.load()  # raises on a truncated file
            return Picture(uri("png", path.read_bytes()), *image.size, caption)
        return encoded(image, caption)


def encoded(image: Image.Image, caption: str = "", *, lossless: bool = False) -> Picture:
    """An image for the page, scaled down to `SIDE`; `lossless` for drawings, whose edges must stay sharp."""
    file = io.BytesIO()
    if lossless:
        image.save(file, "PNG", optimize=True)
        return Picture(uri("png", file.getvalue()), *image.size, caption)
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE))
    image.save(file, "WEBP", quality=82)
    return Picture(uri("webp", file.getvalue()), *image.size, caption)


def uri(kind: str, content: bytes) -> str:
    """The bytes of an image as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
