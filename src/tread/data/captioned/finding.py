"""Finding samples and their captions in folders, tables and datasets.

- A folder is searched with its subfolders, in sorted order, but for those that hold another entry's files; a table and
  a dataset are read row by row.
- A sample has its captions, or the reason why it has none. Its file is not opened here.
- `photo_mask.png` (or `.mask`, `-mask`) beside `photo.jpg` is its mask and no sample. Other pairings are by
  folder, in `samples.py`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tread.data.captioned.captions import variants
from tread.data.captioned.entries import LONGEST, TABLES, DataConfig
from tread.data.captioned.pixels import is_clip, is_image
from tread.data.captioned.tables import COLUMNS, Media, choose_columns, load_dataset, media_in_cell, read_table
from tread.errors import ConfigError, DataError, printable, shown
from tread.files import files_below, is_file, is_folder

MASK_ENDINGS = (".mask", "_mask", "-mask")
"""Ending of a mask's stem after its picture's stem."""
UNREAD = (".avif", ".heic", ".heif", ".jfif", ".jxl")
"""Formats of images that are listed as left out; other files of a folder, such as captions, are none of a run's."""
TABLE_STRATEGIES = ("csv", "jsonl", "parquet", "huggingface")
"""The caption strategies that need a column of captions."""


class Skipped(NamedTuple):
    """A file that was left out, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate sample, not checked yet."""

    media: Media
    captions: tuple[str, ...] | Skipped
    mask: Media | None = None
    references: tuple[Media, ...] = ()


def find(config: DataConfig, apart: Collection[str] = ()) -> Iterator[Candidate]:
    """The candidate samples of an entry; `apart` are absolute paths of subfolders that are not searched."""
    if config.type == "huggingface":
        yield from _in_dataset(config)
        return
    folder = root_of(config)
    if not is_folder(folder):
        raise ConfigError(f"instance_data_dir of data entry {config.name!r} is {str(folder)!r}, which is no folder.")
    table = Path(config.metadata_file) if config.metadata_file else None
    if table is None and config.caption_strategy is None:
        table = next((path for ending in TABLES if (path := folder / f"metadata{ending}").is_file()), None)
    yield from _in_folder(config, folder, apart) if table is None else _in_table(config, table, folder)


def root_of(config: DataConfig) -> Path:
    """The folder that names are relative to."""
    return Path(config.instance_data_dir) if config.instance_data_dir else Path(config.origin).parent


def _in_folder(config: DataConfig, folder: Path, apart: Collection[str]) -> Iterator[Candidate]:
    everything = files_below(folder, apart)
    for path in everything:
        if path.suffix.lower() in UNREAD:
            reason = "images of this format are not read: save it as .png or .jpg"
            yield Candidate(media=path, captions=Skipped(str(path), reason))
    files = [path for path in everything if is_image(path) or is_clip(path)]
    pictures = {path.with_suffix("") for path in files}
    masks: dict[Path, Path] = {}
    for path in files:
        stem = path.with_suffix("")
        bases = [stem.with_name(stem.name.removesuffix(end)) for end in MASK_ENDINGS if stem.name.endswith(end)]
        if is_image(path) and bases and bases[0] in pictures:
            masks[bases[0]] = path
    beside = set(masks.values())
    for path in files:
        if path not in beside:
            yield Candidate(media=path, captions=_captions(config, path, None), mask=masks.get(path.with_suffix("")))


def _in_table(config: DataConfig, table: Path, folder: Path) -> Iterator[Candidate]:
    rows = read_table(table)
    if not rows:
        raise DataError(f"{table} has no rows: write one for each sample, below a header line in CSV")
    columns = list(dict.fromkeys(name for row in rows for name in row if isinstance(name, str)))
    file_column, caption_columns, mask_column, reference_columns = _choose(config, columns, str(table))
    for number, row in enumerate(rows, start=1):
        name = row.get(file_column)
        if not name:
            yield Candidate(media=table, captions=Skipped(f"{table} row {number}", f"column {file_column} is empty"))
            continue
        path = folder / str(name)
        mask = row.get(mask_column) if mask_column else None
        references = filter(None, _cells(row, reference_columns))
        yield Candidate(
            media=path,
            captions=_captions(config, path, _cells(row, caption_columns) if caption_columns else None),
            mask=folder / str(mask) if mask else None,
            references=tuple(folder / str(reference) for reference in references),
        )


def _in_dataset(config: DataConfig) -> Iterator[Candidate]:
    table = load_dataset(config)
    # `datasets` calls the file column of an image folder `image`, whatever the table calls it
    file_column, caption_columns, mask_column, reference_columns = _choose(config, table.column_names, config.origin)
    for number in range(len(table)):
        row = table[number]

        def media_of(*columns: str | None, row: Any = row, number: int = number) -> list[Media]:
            cells = (
                media_in_cell(table, column, number, row[column], f"{config.origin}/{column}")
                for column in columns
                if column is not None
            )
            return [media for cell in cells for media in cell]

        media, mask = (next(iter(media_of(column)), None) for column in (file_column, mask_column))
        if media is None:
            name = f"{config.origin}[{number}]"
            yield Candidate(media=Path(name), captions=Skipped(name, f"column {file_column} is empty"))
            continue
        captions = _captions(config, Path(str(media)), _cells(row, caption_columns))
        yield Candidate(media=media, captions=captions, mask=mask, references=tuple(media_of(*reference_columns)))


def _cells(row: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    """The values in some columns of a row, each of which may hold one or a list."""
    cells = (row.get(column) for column in columns)
    return [value for cell in cells for value in (cell if isinstance(cell, list | tuple) else [cell])]


def _choose(
    config: DataConfig, columns: list[str], where: str
) -> tuple[str, tuple[str, ...], str | None, tuple[str, ...]]:
    """The columns of files, captions, masks and references."""
    chosen = {setting: choose_columns(columns, config, setting, where) for setting in COLUMNS}
    references, captions = chosen.pop("reference_column"), chosen.pop("caption_column")
    file_column, mask_column = (next(iter(names), None) for names in chosen.values())
    if file_column is None:
        raise ConfigError(
            f"no column of files in {where}, which has {', '.join(columns) or 'no columns'}; name it in image_column."
        )
    needed = config.caption_strategy in TABLE_STRATEGIES or (config.caption_strategy is None and config.dataset_name)
    if not captions and needed and not config.instance_prompt:
        raise ConfigError(
            f"no column of captions in {where}, which has {', '.join(columns)}; name it in caption_column."
        )
    return file_column, captions, mask_column, references


def _captions(config: DataConfig, path: Path, cell: Sequence[Any] | None) -> tuple[str, ...] | Skipped:
    """The captions of a sample; `cell` holds those of its row, None without a table."""
    strategy = config.caption_strategy or ("textfile" if cell is None else "csv")
    if strategy == "instanceprompt":
        found, lack = [config.instance_prompt], ""
    elif strategy == "filename":
        found, lack = [path.stem.replace("_", " ")], "its name has no words"
    elif strategy == "textfile":
        text = path.with_suffix(".txt")
        lack = f"it has no caption: there is no text in {text.name}"
        try:
            read = _text(text) if is_file(text) else ""
            found = read.splitlines() if config.caption_lines else [read]
        except UnicodeDecodeError:
            return Skipped(str(path), f"its caption {text.name} is not UTF-8 text: save it again as UTF-8")
        except OSError as error:
            return Skipped(str(path), f"its caption {text.name} cannot be read ({error})")
    else:
        found, lack = cell or (), "it has no caption in the table"
    captions = [" ".join(str(text).split()) for text in found if text is not None]
    captions = [text for text in captions if text]
    if long := [text for text in captions if len(text) > LONGEST]:
        return Skipped(str(path), f"its caption has {len(long[0])} characters; at most {LONGEST} are read")
    if cut := [text for text in captions if printable(text) != text]:  # which no tokenizer takes
        return Skipped(str(path), f"its caption has a character that is not text, in {shown(cut[0], 60)}: remove it")
    if not captions and config.instance_prompt:
        captions = [" ".join(config.instance_prompt.split())]
    return tuple(one for text in captions for one in variants(text, config)) or Skipped(str(path), lack)


def _text(path: Path) -> str:
    """The first 2 * LONGEST characters of a file: enough to tell that a caption is too long."""
    with open(path, encoding="utf-8-sig") as file:
        return file.read(2 * LONGEST)
