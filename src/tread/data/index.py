"""A cached index of the samples in tar shards.

- A tar is read as a map, not as a stream: a stream needs a shuffle buffer, whose state a resumed run could not restore.
- The grouping is WebDataset's own: the key is the path up to the first dot of the file name, the rest is the suffix. A
  sample is `latent.npy` and `cls` under one key; other suffixes are ignored.
- The index holds the label itself: a bad label is reported before the first step instead of hours into the run, and a
  sample takes one read.
- One cache file per shard, named by path, size and modification time, so that only added or rewritten shards are
  indexed again. A cache that cannot be read or written costs time but no error.
- Python's tarfile treats a damaged header as the end of the archive, so the end mark is checked here: a truncated shard
  is an error, not a smaller dataset.
"""

import glob
import hashlib
import io
import os
import re
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from braceexpand import braceexpand
from tqdm import tqdm

from tread.errors import ConfigError, DataError, TreadWarning
from tread.files import atomic_write, cache_folder, is_file, is_folder, regular
from tread.words import counted

_FORMAT = 1
_BLOCK = 512
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")  # key, suffix
_META = re.compile(r"__[^/]*__($|/)")
_RANGE = re.compile(r"(-?\d+)[.][.](-?\d+)")  # within braces
MOST = 1_000_000
"""Shards that a pattern may stand for."""
_COLUMNS = ("key", "offset", "size", "label")


@dataclass(frozen=True)
class ShardIndex:
    """One row per sample, in shard order and within a shard in file order; every array is (N,)."""

    shards: tuple[Path, ...]
    shard: np.ndarray
    """Index into `shards`."""
    key: np.ndarray
    """UTF-8 bytes."""
    offset: np.ndarray
    """Byte offset of latent.npy in the shard."""
    size: np.ndarray
    """Size of latent.npy in bytes."""
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.offset)

    def name(self, i: int) -> str:
        """The sample's name in messages."""
        return f"{self.key[i].decode()} in {self.shards[self.shard[i]]}"


def index_shards(path: str | Path) -> ShardIndex:
    """Index a folder of tars, one tar, a glob, or a brace pattern such as `data/shard-{000..010}.tar`."""
    shards = expand_shards(path)
    bar = tqdm(shards, desc="indexing shards", unit="shard", delay=1, leave=False, disable=None)
    parts = [_cached(shard) for shard in bar]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in _COLUMNS}  # each (N,)
    if not len(columns["key"]):
        raise DataError(f"there are no samples in the {counted(len(shards), 'shard')} at {path}: write them again")
    counts = [len(part["key"]) for part in parts]
    return ShardIndex(shards=tuple(shards), shard=np.repeat(np.arange(len(shards)), counts), **columns)


def expand_shards(path: str | Path) -> list[Path]:
    """The existing tar files that a path setting stands for, in a fixed order."""
    text = os.path.expanduser(path)
    if is_folder(text):
        shards = sorted(Path(text).glob("*.tar"))
        if not shards:
            raise ConfigError(f"no shards (*.tar) in the folder {path}: set data.path to the folder that has them")
        return shards
    if is_file(text):
        return [Path(text)]
    try:
        # the library lists every number of a range at once
        long = any(abs(int(last) - int(first)) >= MOST for first, last in _RANGE.findall(text))
        patterns = [] if long else list(islice(braceexpand(text), MOST + 1))
    except ValueError as error:
        raise ConfigError(f"data.path {path} has an unbalanced brace: write it like shard-{{000..010}}.tar") from error
    if long or len(patterns) > MOST:
        raise ConfigError(f"data.path {path} stands for more than {MOST:,} shards: write a shorter range or a glob")
    shards = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern] * os.path.isfile(pattern)
        if not found and len(patterns) > 1:
            raise ConfigError(
                f"shard {pattern} of data.path {path} is missing: restore it or change the range in the braces"
            )
        shards += map(Path, found)
    if not shards:
        raise ConfigError(f"no shards at {path}: set data.path to a folder of tars, a tar, a glob or a brace pattern")
    return shards


def open_shard(shard: Path) -> io.BufferedReader:
    try:
        return open(regular(shard), "rb")
    except OSError as error:
        raise DataError(f"cannot open shard {shard} ({error.strerror}): restore it or make it readable") from error


def _cached(shard: Path) -> dict[str, np.ndarray]:
    try:
        cache = _cache_file(shard)
        with np.load(cache, allow_pickle=False) as stored:
            return {name: stored[name] for name in _COLUMNS}
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # no cache yet, or a damaged one
    columns = _index_one(shard)
    try:
        cache = _cache_file(shard)
        cache.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(cache) as file:
            np.savez(file, allow_pickle=False, **columns)
    except (OSError, RuntimeError) as error:
        # the same text for every shard, so that Python shows it once
        warnings.warn(
            f"the index of the shards could not be kept ({getattr(error, 'strerror', None) or error}), so the next "
            "run indexes them again: point XDG_CACHE_HOME to a writable folder",
            TreadWarning,
            stacklevel=2,
        )
    return columns


def _cache_file(shard: Path) -> Path:
    stat = shard.stat()
    identity = f"{_FORMAT}\0{shard.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return cache_folder() / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"


def _index_one(shard: Path) -> dict[str, np.ndarray]:
    samples: dict[str, dict[str, tuple[int, int]]] = {}  # key -> suffix -> (offset, size)
    with open_shard(shard) as file:
        for name, offset, size in _members(file, shard):
            match = _NAME.match(name)
            if match is None or _META.match(name):
                continue
            key, suffix = match.groups()
            suffix = suffix.lower().replace("cls.npy", "cls")
            sample = samples.setdefault(key, {})
            if suffix in sample:
                raise DataError(f"sample {key} in {shard} has two {suffix} files: write the shard again")
            sample[suffix] = (offset, size)
        for key, sample in samples.items():
            for suffix in ("latent.npy", "cls"):
                if suffix not in sample:
                    raise DataError(
                        f"sample {key} in {shard} has no {suffix}: write the shard again with latent.npy and "
                        "cls for every sample"
                    )
        labels = [_read_label(file, *sample["cls"], f"{key} in {shard}") for key, sample in samples.items()]
    spans = np.array([sample["latent.npy"] for sample in samples.values()], dtype=np.int64).reshape(-1, 2)
    return {
        "key": np.array([key.encode() for key in samples], dtype=bytes),
        "offset": spans[:, 0],
        "size": spans[:, 1],
        "label": np.array(labels, dtype=np.int64),
    }


def _members(file: io.BufferedReader, shard: Path) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of the regular files of a tar; a damaged tar raises a DataError."""
    broken = f"shard {shard} is truncated or not a plain tar"
    advice = "copy or write it again"
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue] - tarfile would keep them all
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                if member.isreg():
                    yield member.name, member.offset_data, member.size
    except (tarfile.TarError, OSError, ValueError, OverflowError, EOFError) as error:
        raise DataError(f"{broken} ({error}): {advice}") from error
    file.seek(end)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise DataError(f"{broken} (no end mark after byte {end}): {advice}")


def _read_label(file: io.BufferedReader, offset: int, size: int, name: str) -> int:
    file.seek(offset)
    raw = file.read(size)
    try:
        if raw.startswith(b"\x93NUMPY"):
            array = np.load(io.BytesIO(raw), allow_pickle=False)
            if array.size != 1 or array.dtype.kind not in "iu":
                raise ValueError(f"an array of {array.size} {array.dtype}")
            return int(array.item())
        return int(np.int64(int(raw)))
    except Exception as error:  # numpy passes a damaged header to Python's tokenizer
        raise DataError(
            f"the cls of sample {name} is {raw[:40]!r}, not a whole number: write the class index as text"
        ) from error
