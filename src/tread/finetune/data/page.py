"""The page of `tread data CONFIG --html PAGE`: thumbnails by bucket with captions and masks, in one file.

- A thumbnail is the crop that a run would encode, scaled down; for a clip, four of its frames. A mask is shown as the
  same picture, faded where the loss weighs less.
- Large datasets are thinned out, evenly within each bucket, so that the file stays small.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from tread.data.captioned.masks import read_mask
from tread.data.captioned.pixels import read_pixels
from tread.data.captioned.tables import Media, opened
from tread.data.images import reading, upright_rgb
from tread.errors import DataError, shortened
from tread.files import write_text
from tread.finetune.data.survey import Seen, Survey, facts, visits
from tread.page.document import Section, asset, document
from tread.page.html import Html, tag
from tread.page.pictures import encoded, spread
from tread.words import counted

SIDE = 320
"""Longest side of a thumbnail in pixels."""
FRAMES = 4
"""Frames of a clip that are shown."""
FADED = 0.2
"""Opacity of a pixel whose loss weight is 0."""
CAPTIONS = 8
"""Captions of a sample that are shown after the first."""
LONGEST = 600
"""Characters of a caption that are shown."""
LEFT_OUT = 200
"""Files that were left out and are listed."""


def write_page(path: Path, survey: Survey, *, heading: str, command: str, most: int) -> Path:
    """Write the page of a survey, with at most about `most` samples."""
    sections: list[Section] = [("Entries", _entries(survey))]
    share = min(1.0, most / max(1, survey.count))
    for bucket, some in survey.buckets.items():
        shown = spread(some, max(2, round(share * len(some))))
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            figures = list(pool.map(_figure, shown))
        hidden = f"; {len(shown)} of them are shown" if len(shown) < len(some) else ""
        lead = f"{counted(len(some), 'sample')}, {counted(visits(some), 'visit')} an epoch{hidden}."
        title = f"{bucket.width} x {bucket.height}" + (f", {bucket.frames} frames" if bucket.frames > 1 else "")
        sections.append((title, tag("div", tag("p", lead), tag("div", *figures, class_="samples"))))
    if survey.skipped:
        sections.append(("Left out", _left_out(survey)))
    text = document(
        sections,
        kicker="tread data",
        title=heading,
        heading=heading,
        notes=survey.notes,
        command=command,
        style=asset("data.css"),
    )
    write_text(path, text, errors="backslashreplace")
    return path


def _entries(survey: Survey) -> Html:
    rows = [
        tag("tr", tag("th", entry.name, scope="row"), tag("td", ", ".join(facts(entry, some))))
        for index, entry in enumerate(survey.entries)
        if (some := survey.of(index))
    ]
    return tag("div", tag("p", f"{survey.summary}."), tag("div", tag("table", *rows, class_="facts"), class_="wide"))


def _left_out(survey: Survey) -> Html:
    rows = [tag("tr", tag("td", name), tag("td", reason)) for name, reason in survey.skipped[:LEFT_OUT]]
    more = len(survey.skipped) - LEFT_OUT
    lead = f"{counted(len(survey.skipped), 'file')} cannot be used" + (f", {more} are not listed." if more > 0 else ".")
    return tag("div", tag("p", lead), tag("div", tag("table", *rows, class_="settings"), class_="wide"))


def _figure(one: Seen) -> Html:
    """A sample: its crop, its mask and references, its captions."""
    sample, name = one.sample, Path(str(one.sample.media)).name
    first, *others = sample.captions
    try:
        pictures, note = _pictures(one)
    except DataError as error:
        pictures, note = [], f"; {error}"
    width, height = sample.size
    told = [f"{width} x {height}", *([f"{sample.frames} frames"] if sample.frames > 1 else []), one.config.name]
    rest = counted(len(others), "more caption") + (f", the first {CAPTIONS}" if len(others) > CAPTIONS else "")
    listed = [tag("p", shortened(caption, LONGEST)) for caption in others[:CAPTIONS]]
    caption = tag(
        "figcaption",
        tag("p", tag("b", name), f" {', '.join(told)}{note}", class_="file"),
        tag("p", shortened(first, LONGEST), class_="text"),
        tag("details", tag("summary", rest), *listed) if others else "",
    )
    return tag("figure", tag("div", *pictures, class_="pictures"), caption, class_="sample")


def _pictures(one: Seen) -> tuple[list[Html], str]:
    """The pictures of a sample, and a note about its mask."""
    sample, crop, note = one.sample, one.crop, ""
    pixels = read_pixels(sample.media, crop).numpy()  # (F, H, W, 3)
    made = [_image(_together(spread(list(pixels), FRAMES)), f"{sample.media}: the crop")]
    if sample.mask is not None:
        weights = read_mask(sample.mask, crop, sample.mask_kind).numpy()  # (H, W)
        faded = pixels[0] * (FADED + (1 - FADED) * weights[..., None])
        faded += 128 * (1 - FADED) * (1 - weights[..., None])
        made.append(_image(faded.round().astype(np.uint8), "the same, faded where the loss weighs less"))
        note = f", {weights.mean():.0%} of it under the mask"
    made += [_image(_opened(media), "a reference image") for media in sample.references]
    return made, note


def _together(frames: Sequence[np.ndarray]) -> np.ndarray:
    """Frames in one picture: four in two rows, fewer in one."""
    if len(frames) < FRAMES:
        return np.concatenate(frames, axis=1)
    rows = (np.concatenate(frames[i : i + 2], axis=1) for i in (0, 2))
    return np.concatenate([*rows], axis=0)


def _opened(media: Media) -> np.ndarray:
    with reading(media), Image.open(opened(media)) as image:
        return np.asarray(upright_rgb(image))


def _image(pixels: np.ndarray, about: str) -> Html:
    image = Image.fromarray(pixels)
    image.thumbnail((SIDE, SIDE))
    picture = encoded(image)
    return tag("img", src=picture.uri, width=picture.width, height=picture.height, alt=about)
