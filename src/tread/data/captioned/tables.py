"""Tables of samples: CSV, JSONL and Parquet files, and Hugging Face datasets.

- A table gives one mapping per sample; columns are named by the settings or recognised by their usual names.
- `Media` is a picture or a clip: a file, or a cell of a dataset that holds the file's bytes. Cells are read on demand.
- `datasets` and `pyarrow` are imported only to read a dataset or a Parquet file.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tread.config.schema import several
from tread.data.captioned.entries import DataConfig
from tread.errors import ConfigError, DataError, needs, one_line
from tread.files import is_file, regular

COLUMNS = {
    "image_column": ("file_name", "file", "filename", "path", "image", "video"),
    "caption_column": ("text", "caption", "captions", "prompt"),
    "mask_column": ("mask", "mask_file_name"),
    "reference_column": ("reference", "references", "reference_file_name"),
}
"""For each setting, the column names that are recognised without it, in order of preference."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A file whose bytes are in a row of a dataset."""

    table: Any
    column: str
    row: int
    name: str
    index: int | None = None
    """Position in a cell that holds a list."""

    def __str__(self) -> str:
        return self.name

    @property
    def identity(self) -> str:
        """A string that is equal for equal content: a dataset's fingerprint changes with its data."""
        at = "" if self.index is None else f"/{self.index}"
        return f"{self.table._fingerprint}/{self.column}/{self.row}{at}"

    def read(self) -> bytes:
        """The file's content."""
        cell = self.table[self.row][self.column]
        return (cell if self.index is None else cell[self.index])["bytes"]


Media = Path | Cell


def opened(media: Media) -> Path | io.BytesIO:
    """A path or stream that Pillow and PyAV can open."""
    return regular(media) if isinstance(media, Path) else io.BytesIO(media.read())


def choose_columns(columns: Sequence[str], config: DataConfig, setting: str, where: str) -> tuple[str, ...]:
    """The columns that a setting of the entry names, else the first of COLUMNS present; empty if none is."""
    named = several(getattr(config, setting))
    for name in named:
        if name not in columns:
            raise ConfigError(
                f"{setting} is {name!r}, but {where} has the columns {', '.join(columns)}; name one of them."
            )
    return named or tuple(name for name in COLUMNS[setting] if name in columns)[:1]


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV (with a header line), JSONL or Parquet file."""
    if not is_file(path):
        raise ConfigError(f"metadata_file {str(path)!r} does not exist.")
    try:
        if path.suffix.lower() == ".parquet":
            return _parquet(path)
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".csv":
                return list(_csv_rows(file, path))
            return list(_json_lines(file, path))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"table {path} cannot be read ({error}): save it again as UTF-8 text") from error


def _csv_rows(lines: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    rows = csv.DictReader(lines, strict=True)
    header = rows.fieldnames or ()
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise DataError(f"table {path} has the header {header[0]!r}: separate its columns by commas")
    for row in rows:
        if any(row.pop(None, ())):  # pyright: ignore[reportArgumentType]
            raise DataError(
                f"line {rows.line_num} of {path} has more cells than the header's {len(header)}: put a caption that "
                "holds commas in double quotes"
            )
        yield dict(row)


def _json_lines(lines: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {number} of {path} is not valid JSON ({error}): correct it") from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of {path} is not a JSON object: write one {{...}} per line")
        yield row


def _parquet(path: Path) -> list[dict[str, Any]]:
    with needs("a Parquet table needs pyarrow", "data"):
        from pyarrow import ArrowException, parquet
    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"table {path} cannot be read ({error}): write it again") from error


def load_dataset(config: DataConfig) -> Any:
    """The dataset of a `huggingface` entry, with decoding of images and videos turned off."""
    with needs("a Hugging Face dataset needs datasets", "data"):
        import datasets
    origin = config.origin
    # datasets shows a progress bar per file
    quiet = not datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        saved = any((Path(origin) / name).is_file() for name in ("state.json", "dataset_dict.json"))
        table: Any = datasets.load_from_disk(origin) if saved else datasets.load_dataset(origin)
    except Exception as error:  # builders raise whatever the files make them raise
        reason = one_line(error)[:300]
        raise DataError(
            f"dataset_name {origin!r} cannot be loaded ({reason}): give a folder or the id of a dataset in reach"
        ) from error
    finally:
        if not quiet:
            datasets.enable_progress_bars()
    if isinstance(table, Mapping):
        if config.split not in table:
            raise ConfigError(f"split is {config.split!r}; {origin!r} has {', '.join(table)}.")
        table = table[config.split]
    for column, feature in table.features.items():
        if isinstance(feature, datasets.Image | datasets.Video):
            table = table.cast_column(column, type(feature)(decode=False))
    return table


def media_in_cell(table: Any, column: str, row: int, value: object, where: str) -> list[Media]:
    """The pictures in a cell, which may hold one, a list or nothing."""
    if isinstance(value, list | tuple):
        cells = (_cell_media(table, column, row, one, f"{where}[{row}]", i) for i, one in enumerate(value))
    else:
        cells = (_cell_media(table, column, row, value, f"{where}[{row}]", None),)
    return [media for media in cells if media is not None]


def _cell_media(table: Any, column: str, row: int, value: object, name: str, index: int | None) -> Media | None:
    if isinstance(value, str):
        return Path(value)
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return Cell(table, column, row, name if index is None else f"{name}[{index}]", index)
        if value.get("path") is not None:
            return Path(value["path"])
    return None
