"""Fonts for names in pictures: Pillow's own covers ASCII, other text needs a font of the machine."""

import unicodedata
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
FILES = ("DejaVuSans.ttf", "NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "arial.ttf", "msyh.ttc", "malgun.ttf")
"""Fonts of Linux, macOS and Windows, which Pillow looks for in the system's folders."""
NO_CHARACTER = "\U0010ffff"


def legible(text: str, size: int) -> tuple[str, Font]:
    """A text and the first font that has all its characters; if none has, the text with escapes such as \\u732b."""
    text = unicodedata.normalize("NFC", text)
    for font in _fonts(size):
        if text.isprintable() and all(_has(font, character) for character in text):
            return text, font
    return "".join(c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in text), ImageFont.load_default(size)


def _fonts(size: int) -> Iterator[Font]:
    yield ImageFont.load_default(size)
    for file in (*FILES, *_of_matplotlib()):
        if (font := _open(file, size)) is not None:
            yield font


def _of_matplotlib() -> list[str]:
    """The DejaVu Sans that matplotlib brings, if it is installed."""
    spec = find_spec("matplotlib")
    folders = spec.submodule_search_locations if spec is not None else None
    return [str(Path(folder, "mpl-data/fonts/ttf/DejaVuSans.ttf")) for folder in folders or ()]


@cache
def _open(file: str, size: int) -> Font | None:
    try:
        return ImageFont.truetype(file, size)
    except OSError:  # not on this machine
        return None


def _has(font: Font, character: str) -> bool:
    """Whether a font has a glyph of its own for a character, unlike the box of what it lacks."""
    glyph, box = font.getmask(character), font.getmask(NO_CHARACTER)
    return bytes(glyph) != bytes(box)  # pyright: ignore[reportArgumentType]
