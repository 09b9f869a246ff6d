"""The settings of captioned data: one entry per folder, table or dataset.

- Setting names follow existing trainers. Every setting except the path has a default, so that a folder of images with
  `.txt` captions needs nothing else.
- An entry is checked when it is made, without reading files.
- `tread.config.schema` parses the dataclasses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tread.config.schema import at_least
from tread.errors import ConfigError, shown
from tread.files import is_folder

TABLES = (".csv", ".jsonl", ".parquet")
"""Suffixes of a `metadata_file`."""

LONGEST = 50_000
"""Most characters of a caption: encoders read some hundred words, and tokenizing megabytes takes minutes."""

MOST_VARIANTS = 1024
"""Most variants of one caption: their embeddings take megabytes each."""

CaptionStrategy = Literal["textfile", "filename", "instanceprompt", "csv", "jsonl", "parquet", "huggingface"]
ConditioningType = Literal["mask", "segmentation", "reference"]
ResolutionType = Literal["pixel", "pixel_area", "area"]
Flip = bool | Literal["always"]


@dataclass(frozen=True, kw_only=True)
class VideoConfig:
    """Settings of video clips."""

    num_frames: int = 81
    """Largest number of frames read from a clip, from its start and at its own rate; shorter clips give fewer."""
    min_frames: int = 1
    """Clips with fewer frames are left out."""
    max_frames: int | None = None
    """Clips with more frames are left out; null sets no limit."""
    frame_rate: float | None = None
    """Frames per second that clips are read at: frames are skipped or repeated; null: each clip at its own rate."""

    def __post_init__(self) -> None:
        at_least(self, "video", num_frames=1, min_frames=1, max_frames=1)
        if self.frame_rate is not None and self.frame_rate <= 0:
            raise ConfigError(f"video.frame_rate is {self.frame_rate}; it must be above 0, or left out.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """One entry of `data`."""

    id: str = ""
    """The name of this entry in messages and in `conditioning_data`; by default the last part of its path."""
    type: Literal["local", "csv", "huggingface"] = "local"
    """The source: a folder, a table that names files, or a Hugging Face dataset."""
    dataset_type: Literal["image", "video", "conditioning", "eval"] | None = None
    """The content; null takes images, and clips too if the model is a video model. `eval` is never trained on;
    `conditioning` holds masks or references of another entry."""
    instance_data_dir: str | None = None
    """The folder of images or clips, searched with its subfolders."""
    metadata_file: str | None = None
    """A CSV, JSONL or Parquet table with one row per sample; files are relative to `instance_data_dir`, or else to the
    table."""
    dataset_name: str | None = None
    """A Hugging Face dataset: a folder (save_to_disk, Parquet or an image folder) or an id on the hub."""
    split: str = "train"
    """The part of a Hugging Face dataset that is read."""
    image_column: str | None = None
    """The column of the files; null looks for file_name, file, filename, path, image or video."""
    caption_column: str | tuple[str, ...] | None = None
    """The column of the captions, or one column for each of several captions; null looks for text, caption, captions
    or prompt. A cell may hold a list."""
    mask_column: str | None = None
    """The column of the masks; null looks for mask or mask_file_name."""
    reference_column: str | tuple[str, ...] | None = None
    """The column of the reference images, or one column for each; null looks for reference, references or
    reference_file_name. A cell may hold a list."""
    caption_strategy: CaptionStrategy | None = None
    """The source of captions; null takes the table if there is one, else `.txt` files."""
    instance_prompt: str | None = None
    """The caption of all samples (`instanceprompt`), or of those that have none of their own."""
    caption_lines: bool = False
    """Whether each line of a `.txt` file is a caption of its own, of which a visit draws one; otherwise line breaks
    count as spaces."""
    trigger_word: str | None = None
    """The word that the training teaches: it replaces `[trigger]` in captions, and is put in front of captions that
    have neither."""
    caption_prefix: str = ""
    """Text in front of every caption, after the trigger word."""
    caption_suffix: str = ""
    """Text after every caption."""
    shuffle_tags: bool = False
    """Whether the tags of a caption are put in another order at each visit, one of `caption_variants`."""
    tag_dropout: float = 0.0
    """The probability that a tag is left out of a caption, drawn for each of its `caption_variants`; one tag stays."""
    keep_tags: int = 0
    """Number of tags at the start of a caption that are neither shuffled nor left out."""
    tag_separator: str = ","
    """The separator between the tags of a caption."""
    caption_variants: int = 16
    """Number of shuffled or thinned versions of one caption; each is encoded once and kept in the cache."""
    horizontal_flip: Flip = False
    """Whether a visit shows the sample mirrored, half of the time; the mirrored image is encoded too. Refused where
    masks look like text, which cannot be mirrored, unless it is `always`."""
    loss_weight: float = 1.0
    """Factor on the loss of these samples, e.g. of regularisation images."""
    repeats: int = 1
    """Number of visits to each sample per epoch."""
    resolution: float = 1024
    """The size that samples are scaled to, in the unit of `resolution_type`."""
    resolution_type: ResolutionType = "pixel_area"
    """`pixel`: the shorter side; `pixel_area`: the side of the square of equal area; `area`: megapixels of 1024 x
    1024."""
    crop: bool = False
    """Whether samples are cropped to `crop_aspect`; otherwise only to the nearest bucket's aspect ratio."""
    crop_style: Literal["center", "random"] = "center"
    """The position of crops; `random` is a hash of the file's content, so that the cache stays valid."""
    crop_aspect: Literal["square", "preserve"] = "square"
    """The aspect ratio that `crop` crops to."""
    minimum_image_size: float | None = None
    """Smaller samples are left out; in the unit of `resolution_type`."""
    maximum_image_size: float | None = None
    """With `crop`, larger samples are first scaled down to `target_downsample_size`, smaller ones not at all."""
    target_downsample_size: float | None = None
    """With `crop`, the size that the crop is taken from; null takes the largest possible crop."""
    reference_resolution: float | None = None
    """The size that reference images are scaled to, in the unit of `resolution_type`; null: as the model's pipeline
    scales them, or like the samples where it leaves that to its caller."""
    conditioning_data_dir: str | tuple[str, ...] | None = None
    """A folder with a file of the same name for each sample: its mask or its reference image. Several folders: a
    reference in each."""
    conditioning_type: ConditioningType | None = None
    """The content of `conditioning_data_dir` (null: mask), and how masks beside the images are read."""
    conditioning_data: str | tuple[str, ...] | None = None
    """The id, or ids, of `conditioning` entries that belong to this one; of several with references, each has one."""
    video: VideoConfig = field(default_factory=VideoConfig)
    """Settings of video clips."""

    def __post_init__(self) -> None:
        key = {"local": "instance_data_dir", "csv": "metadata_file", "huggingface": "dataset_name"}[self.type]
        has_table = self.type == "local" and self.metadata_file is not None
        if getattr(self, key) is None and not has_table:
            raise ConfigError(f"data entry {self.name!r} of type {self.type!r} has no {key}; set it.")
        if self.metadata_file is not None and not self.metadata_file.lower().endswith(TABLES):
            raise self._wrong("metadata_file", f"it must end with {', '.join(TABLES)}")
        if self.caption_strategy in ("csv", "jsonl", "parquet") and self.metadata_file is None:
            raise self._wrong("caption_strategy", "that needs metadata_file, the table of captions")
        if (self.caption_strategy == "huggingface") and self.type != "huggingface":
            raise self._wrong("caption_strategy", "that needs type 'huggingface'; write 'textfile' for .txt files")
        if self.caption_strategy == "textfile" and self.type == "huggingface":
            raise self._wrong("caption_strategy", "a Hugging Face dataset has no .txt files; write 'huggingface'")
        if self.caption_strategy == "instanceprompt" and not self.instance_prompt:
            raise self._wrong("caption_strategy", "that needs instance_prompt, the caption of all samples")
        if self.instance_prompt is not None and len(self.instance_prompt) > LONGEST:
            raise self._wrong("instance_prompt", f"a caption has at most {LONGEST} characters")
        for name in ("trigger_word", "caption_prefix", "caption_suffix"):
            if len(getattr(self, name) or "") > LONGEST:
                raise self._wrong(name, f"a caption has at most {LONGEST} characters")
        if not 0 <= self.tag_dropout < 1:
            raise self._wrong("tag_dropout", "allowed is 0 <= value < 1")
        if self.keep_tags < 0:
            raise self._wrong("keep_tags", "it must be at least 0")
        if not self.tag_separator:
            raise self._wrong("tag_separator", "it must be a character such as ',' or ' '")
        if not 1 <= self.caption_variants <= MOST_VARIANTS:
            raise self._wrong("caption_variants", f"allowed is 1 to {MOST_VARIANTS}; each one is encoded")
        if not 0 <= self.loss_weight < math.inf:
            raise self._wrong("loss_weight", "it must be at least 0")
        if self.repeats < 1:
            raise self._wrong("repeats", "it must be at least 1, which is one visit (0 in data_backend_config)")
        for name in ("minimum_image_size", "maximum_image_size", "target_downsample_size"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise self._wrong(name, "it must be above 0")
        for name in ("resolution", "reference_resolution"):
            if (value := getattr(self, name)) is None:
                continue
            if value < math.ulp(0.0):
                raise self._wrong(name, "it must be above 0")
            if self.resolution_type == "area" and value > 64:
                raise self._wrong(name, "with resolution_type 'area' it counts megapixels; for pixels, use 'pixel'")
            if self.resolution_type != "area" and value < 16:
                raise self._wrong(name, "it counts pixels; for megapixels, use resolution_type 'area'")

    @property
    def name(self) -> str:
        """The name of this entry in messages."""
        origin = self.instance_data_dir or self.metadata_file or self.dataset_name or "data"
        return self.id or Path(origin).name or origin

    @property
    def origin(self) -> str:
        """The path or dataset name, as given."""
        local = self.metadata_file or self.instance_data_dir
        return (self.dataset_name if self.type == "huggingface" else local) or ""

    def _wrong(self, name: str, allowed: str) -> ConfigError:
        return ConfigError(f"{name} of data entry {self.name!r} is {shown(getattr(self, name))}; {allowed}.")


def data_configs(value: object) -> list[dict[str, Any]]:
    """The entries of `data`, which may be a path, one mapping, or a list of either.

    >>> data_configs("photos")
    [{'instance_data_dir': 'photos'}]
    """
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        raise ConfigError("data is an empty list; it must name at least one folder, table or dataset.")
    entries: list[dict[str, Any]] = []
    for entry in values:
        if isinstance(entry, Mapping):
            entries.append(dict(entry))
        elif isinstance(entry, str | Path):
            entries.append(_entry_at(str(entry)))
        else:
            raise ConfigError(f"data has the entry {shown(entry)}; it must be a path or a mapping of settings.")
    return entries


def _entry_at(origin: str) -> dict[str, Any]:
    path = Path(origin)
    if path.suffix.lower() in TABLES:
        return {"metadata_file": origin}
    if not is_folder(path):
        return {"instance_data_dir": origin}
    saved = any((path / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
    if saved or any(path.glob("*.parquet")) or any(path.glob("data/*.parquet")):
        return {"type": "huggingface", "dataset_name": origin}
    return {"instance_data_dir": origin}
