"""The list of captioned samples of the data entries.

- Only headers are read: the list takes seconds, and everything but pixels is checked before a model is loaded.
- Unusable files (no caption, unreadable, too small, of the wrong type) are left out and listed with their reasons. An
  entry without usable files is an error.
- The order is that of the entries, then of sorted paths or of a table's rows, so that an index refers to the same
  sample on every machine and in every process.
- A subfolder that data names itself (masks, references, another entry) holds no samples of the folder around it.
- Masks and references are matched by name: `photo.jpg` has the mask `photo_mask.png` beside it, or `photo.*` in a
  folder of masks. With several folders of references, a sample has one from each that has its name, in their order.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from tread.config.schema import several
from tread.data.captioned.buckets import Size, measure
from tread.data.captioned.captions import TRIGGER
from tread.data.captioned.entries import ConditioningType, DataConfig
from tread.data.captioned.finding import Candidate, Skipped, find, root_of
from tread.data.captioned.masks import MaskKind
from tread.data.captioned.pixels import count_frames, is_clip, is_image, probe
from tread.data.captioned.tables import Media
from tread.errors import ConfigError, DataError, nearest, printable
from tread.files import files_below, write_text
from tread.words import counted

Pairs = dict[ConditioningType, list[dict[str, Path]]]
"""For each conditioning type, one mapping per folder from the name shared with the picture to the file."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One picture or clip with its caption."""

    media: Media
    captions: tuple[str, ...]
    """One or more; a visit draws one of them."""
    size: Size
    """Width and height as shown."""
    frames: int = 1
    mask: Media | None = None
    mask_kind: MaskKind = "mask"
    mask_size: Size | None = None
    references: tuple[Media, ...] = ()
    reference_sizes: tuple[Size, ...] = ()
    dataset: int = 0
    """Index of its data entry."""
    repeats: int = 1
    held_out: bool = False
    """Whether it belongs to an `eval` entry, which is never trained on."""


@dataclass(frozen=True)
class Collected:
    """The usable samples, and the files left out."""

    samples: list[Sample]
    skipped: list[Skipped]


def collect(
    configs: Sequence[DataConfig], *, video: bool, say: Callable[[str], None] = print, progress: bool = True
) -> Collected:
    """All usable samples of the entries; `video` tells whether the model trains on clips.

    `say` prints messages for the user; `skipped` is for `tell_skipped`.
    """
    ids = Counter(config.id for config in configs if config.id)
    for name, count in ids.items():
        if count > 1:
            raise ConfigError(f"{count} data entries have the id {name!r}; give each its own.")
    samples: list[Sample] = []
    skipped: list[Skipped] = []
    apart = _named_folders(configs)
    for index, config in enumerate(configs):
        if config.dataset_type == "conditioning":
            continue
        if config.dataset_type == "video" and not video:
            raise ConfigError(
                f"dataset_type of data entry {config.name!r} is 'video', but the model trains on images: choose a "
                "video model, or entries of images."
            )
        candidates, pairs = list(find(config, apart)), _conditioning(config, configs)
        describe = partial(_describe, config=config, dataset=index, pairs=pairs, video=video)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            done = pool.map(describe, candidates)
            bar = tqdm(done, total=len(candidates), desc=config.name, unit="file", disable=not progress, leave=False)
            described = list(bar)
        kept = [one for one in described if isinstance(one, Sample)]
        left_out = [one for one in described if isinstance(one, Skipped)]
        if not kept:
            raise _nothing(config, left_out)
        samples += kept
        skipped += left_out
        _say_masks(config, kept, pairs, say)
        marked = sum(any(TRIGGER in caption for caption in sample.captions) for sample in kept)
        if marked:
            say(f"{config.name}: captions of {counted(marked, 'sample')} have {TRIGGER}, but there is no trigger_word")
    if not samples:
        raise ConfigError("data has no entry to train on, only conditioning entries; add one of images or clips.")
    return Collected(samples, skipped)


def tell_skipped(skipped: Sequence[Skipped], file: Path, say: Callable[[str], None]) -> None:
    """Write the whole list to `file`, and print its length with a few examples."""
    if not skipped:
        file.unlink(missing_ok=True)
        return
    write_text(file, printable("".join(f"{name}\t{reason}\n" for name, reason in skipped)))
    say(f"{counted(len(skipped), 'file')} left out, all listed in {file}:")
    for name, reason in islice(skipped, 5):
        say(printable(f"  {name}: {reason}"))


def _named_folders(configs: Sequence[DataConfig]) -> set[str]:
    """Absolute paths of the folders that the entries name."""
    named: set[str] = set()
    for config in configs:
        named.update(several(config.conditioning_data_dir or None), several(config.instance_data_dir or None))
    return {os.path.abspath(folder) for folder in named}


def _conditioning(config: DataConfig, configs: Sequence[DataConfig]) -> Pairs:
    """This entry's masks and references, by conditioning type."""
    known = {other.name: other for other in configs if other.dataset_type == "conditioning"}
    pairs: Pairs = {}
    for name in several(config.conditioning_data):
        if name not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(
                f"conditioning_data of data entry {config.name!r} is {name!r}{nearest(name, known)} "
                f"The entries with dataset_type 'conditioning' are: {listed}."
            )
        entry = known[name]
        pairs.setdefault(entry.conditioning_type or "mask", []).append(_by_name(root_of(entry), "instance_data_dir"))
    for folder in several(config.conditioning_data_dir or None):
        kind = config.conditioning_type or "mask"
        pairs.setdefault(kind, []).append(_by_name(Path(folder), "conditioning_data_dir"))
    return pairs


def _by_name(folder: Path, setting: str) -> dict[str, Path]:
    if not folder.is_dir():
        raise ConfigError(f"{setting} names {str(folder)!r}, which is no folder.")
    # reversed, so that the first of several files with one name wins
    return {_shared_name(path, folder): path for path in reversed(files_below(folder)) if is_image(path)}


def _shared_name(media: Media, root: Path) -> str:
    path = Path(str(media))
    return (path.relative_to(root) if path.is_relative_to(root) else path).with_suffix("").as_posix()


def _describe(candidate: Candidate, *, config: DataConfig, dataset: int, pairs: Pairs, video: bool) -> Sample | Skipped:
    """The sample with its size, or the reason why it is left out."""
    if isinstance(candidate.captions, Skipped):
        return candidate.captions
    name, shared = str(candidate.media), _shared_name(candidate.media, root_of(config))
    if isinstance(candidate.media, Path) and not candidate.media.is_file():
        return Skipped(name, "there is no such file")
    moves = isinstance(candidate.media, Path) and is_clip(candidate.media)
    if moves and (not video or config.dataset_type == "image"):
        why = "dataset_type is image" if video else "the model trains on images"
        return Skipped(name, f"it is a clip, and {why}")
    kind: MaskKind = "segmentation" if config.conditioning_type == "segmentation" else "mask"
    mask, beside = candidate.mask, (by_name.get(shared) for by_name in pairs.get("reference", ()))
    references = candidate.references or tuple(path for path in beside if path is not None)
    for other in ("mask", "segmentation"):
        for by_name in pairs.get(other, ()):
            if shared in by_name:
                mask, kind = by_name[shared], other
    if "reference" in pairs and not references:
        return Skipped(name, "it has no reference image of the same name")
    for pair in (mask, *references):
        if isinstance(pair, Path) and not pair.is_file():
            return Skipped(name, f"there is no file {pair}")
    try:
        width, height, frames = probe(candidate.media)
        mask_size = None if mask is None else probe(mask)[:2]
        reference_sizes = tuple(probe(reference)[:2] for reference in references)
    except DataError as error:
        return Skipped(name, str(error))
    frames = frames if video and config.dataset_type != "image" else 1
    if frames > 1 and config.video.frame_rate is not None:
        try:
            frames = count_frames(candidate.media, config.video.frame_rate)
        except DataError as error:
            return Skipped(name, str(error))
    if config.dataset_type == "video" and frames == 1:
        return Skipped(name, "it has one frame, and dataset_type is video")
    if (moves or frames > 1) and not config.video.min_frames <= frames <= (config.video.max_frames or frames):
        return Skipped(name, f"it has {frames} frames, outside video.min_frames and video.max_frames")
    smallest = config.minimum_image_size
    if smallest is not None and measure((width, height), config.resolution_type) < smallest:
        return Skipped(name, f"its {width}x{height} pixels are below minimum_image_size {smallest:g}")
    return Sample(
        media=candidate.media,
        captions=candidate.captions,
        size=(width, height),
        frames=frames,
        mask=mask,
        mask_kind=kind,
        mask_size=mask_size,
        references=references,
        reference_sizes=reference_sizes,
        dataset=dataset,
        repeats=config.repeats,
        held_out=config.dataset_type == "eval",
    )


def _nothing(config: DataConfig, skipped: list[Skipped]) -> DataError:
    where = f"nothing to train on in {config.origin} (data entry {config.name!r})"
    if skipped:
        reason = "; ".join(f"{name}: {why}" for name, why in skipped[:3])
        fix = ""
        if all("no caption" in why for _, why in skipped):
            fix = ". Write captions, or set caption_strategy: filename, or one instance_prompt for all"
        return DataError(f"{where}: none is left of {counted(len(skipped), 'file')}, the first because {reason}{fix}")
    root = root_of(config)
    counts = Counter(path.suffix.lower() or path.name for path in files_below(root)) if root.is_dir() else Counter()
    files = ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(5)) or "no files at all"
    return DataError(f"{where}: found {files}; put images or clips with .txt captions there, or name another folder")


def _say_masks(config: DataConfig, samples: list[Sample], pairs: Pairs, say: Callable[[str], None]) -> None:
    """Tell how many samples have a mask, and which masks are stretched; refuse folders of masks that fit none."""
    masked = [sample for sample in samples if sample.mask is not None]
    folders = [by_name for kind in ("mask", "segmentation") for by_name in pairs.get(kind, ())]
    if folders and not masked:
        names = (str(path) for by_name in folders for path in sorted(by_name.values()))
        raise DataError(
            f"none of the {len(samples)} samples of data entry {config.name!r} has a mask in its folder of masks: the "
            f"first sample is {samples[0].media}, the first mask {next(names, 'missing')}. Give masks the names of "
            "their images, or leave out the folder"
        )
    if not masked:
        return
    rest = len(samples) - len(masked)
    without = f"; in the other {rest} every pixel counts" if rest else ""
    say(f"{config.name}: {len(masked)} of {len(samples)} samples have a mask{without}")
    stretched = [sample for sample in masked if _is_stretched(sample)]
    if stretched:
        first, count = stretched[0], counted(len(stretched), "mask")
        shapes = " for ".join("x".join(map(str, size or ())) for size in (first.mask_size, first.size))
        say(
            f"{config.name}: {count} of another shape than the image (the first is "
            f"{first.mask}, {shapes}), stretched to it; a mask of a rotated photo must be rotated too"
        )


def _is_stretched(sample: Sample) -> bool:
    """Whether a mask differs from its image's shape by more than the rounding of its sides."""
    (width, height), (across, down) = sample.size, sample.mask_size or sample.size
    return abs(across * height - width * down) > max(width, height)
