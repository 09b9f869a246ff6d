"""A cached index of the samples in tar shards.

- A tar is read as a map, not as a stream: a stream needs a shuffle buffer, whose state a resumed run could not restore.
- The grouping is WebDataset's own: the key is the path up to the first dot of the file name, the rest is the suffix. A
  sample is `latent.npy` and `cls` under one key; other suffixes are ignored.
- The index holds the label itself: a bad label is reported before the first step instead of hours into the run, and a
  sample takes one read.
- One cache file per shard, named by path, size and modification time (a remote one by URL, size and tag), so that only
  added or rewritten shards are indexed again. A cache that cannot be read or written costs time but no error.
- A shard is indexed once per machine, under a lock. Each rank starts its share of the worker processes and begins at a
  different shard, so that it gets the other ranks' shards from the cache.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from braceexpand import braceexpand
from tqdm import tqdm

from tread.data.cache import RemoteShard, ShardCache
from tread.data.remote import describe, is_remote, list_remote
from tread.errors import ConfigError, DataError, TreadWarning, reason_of
from tread.files import atomic_write, cache_folder, compressed_tar, exclusive, is_file, is_folder, regular
from tread.words import counted

_FORMAT = 1
_BLOCK = 512
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)$")  # key, suffix
_META = re.compile(r"__[^/]*__($|/)")
_RANGE = re.compile(r"(-?\d+)[.][.](-?\d+)")  # within braces
DEFAULT_CACHE = 100 * 10**9
"""Bytes of remote shards to keep."""
MOST = 1_000_000
"""Largest number of shards that one pattern may expand to."""
_COLUMNS = ("key", "offset", "size", "label")
_FEW = 8
"""Fewest shards per worker process: indexing fewer takes less time than starting the process."""
_ASKED = 32
"""Concurrent requests for the sizes of remote shards."""
Shard = Path | RemoteShard
Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class ShardIndex:
    """One row per sample, in shard order and within a shard in file order; every array is (N,)."""

    shards: tuple[Shard, ...]
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


def index_shards(path: str | Path, cache: ShardCache | None = None) -> ShardIndex:
    """Index a folder of tars, one tar, a glob, or a brace pattern such as `data/shard-{000..010}.tar`.

    A URL such as `s3://bucket/shard-{000..010}.tar` is read through `cache`.
    """
    shards = expand_shards(path, cache)
    parts = _indexed(shards)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in _COLUMNS}  # each (N,)
    if not len(columns["key"]):
        raise DataError(f"there are no samples in the {counted(len(shards), 'shard')} at {path}: write them again")
    counts = [len(part["key"]) for part in parts]
    return ShardIndex(shards=tuple(shards), shard=np.repeat(np.arange(len(shards)), counts), **columns)


def _indexed(shards: Sequence[Shard]) -> list[Columns]:
    """The columns of each shard; shards that are not in the cache are indexed by several processes."""
    indexed = {i: columns for i, shard in enumerate(shards) if (columns := _stored(shard)) is not None}
    todo = [i for i in range(len(shards)) if i not in indexed]
    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("LOCAL_WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    first = len(todo) * rank // ranks
    todo = todo[first:] + todo[:first]
    processes = min((os.cpu_count() or 1) // ranks, len(todo) // _FEW)
    bar = tqdm(total=len(todo), desc="indexing shards", unit="shard", delay=1, leave=False, disable=None)
    if processes < 2:
        for i in todo:
            indexed[i] = _cached(shards[i])
            bar.update()
    else:
        try:
            with ProcessPoolExecutor(processes) as pool:  # the same start method as a DataLoader's workers
                for i, columns in zip(todo, pool.map(_cached, [shards[i] for i in todo]), strict=True):
                    indexed[i] = columns
                    bar.update()
        except BrokenProcessPool as error:
            raise DataError(
                "a process that indexed shards was killed, by too little memory perhaps: start again, and the shards "
                "that are done are kept"
            ) from error
    bar.close()
    return [indexed[i] for i in range(len(shards))]


def expand_shards(path: str | Path, cache: ShardCache | None = None) -> list[Shard]:
    """The existing tar files that `data.path` expands to, in a fixed order."""
    text = os.path.expanduser(str(path).removeprefix("file://"))
    if is_folder(text):
        shards: list[Shard] = [*sorted(Path(text).glob("*.tar"))]
        if not shards:
            for other in sorted(Path(text).iterdir()):
                if (refused := compressed_tar(other.name)) is not None:
                    raise ConfigError(f"shard {other} {refused}")
            raise ConfigError(f"no shards (*.tar) in the folder {path}: set data.path to the folder that has them")
        return shards
    if is_file(text):
        return [Path(text)]
    try:
        # braceexpand builds the full list of a numeric range, so its length is checked first
        long = any(abs(int(last) - int(first)) >= MOST for first, last in _RANGE.findall(text))
        patterns = [] if long else list(islice(braceexpand(text), MOST + 1))
    except ValueError as error:
        raise ConfigError(f"data.path {path} has an unbalanced brace: write it like shard-{{000..010}}.tar") from error
    if long or len(patterns) > MOST:
        raise ConfigError(f"data.path {path} stands for more than {MOST:,} shards: write a shorter range or a glob")
    if is_remote(text):
        return _remote_shards(path, patterns, cache)
    shards = []
    for pattern in patterns:
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern] * os.path.isfile(pattern)
        if not matches and len(patterns) > 1:
            raise ConfigError(
                f"shard {pattern} of data.path {path} is missing: restore it or change the range in the braces"
            )
        shards += map(Path, matches)
    if not shards:
        raise ConfigError(f"no shards at {path}: set data.path to a folder of tars, a tar, a glob or a brace pattern")
    return shards


def _remote_shards(path: str | Path, urls: list[str], cache: ShardCache | None) -> list[Shard]:
    cache = cache or ShardCache(cache_folder() / "shards", DEFAULT_CACHE)
    with ThreadPoolExecutor(_ASKED) as pool:
        listed = [url for matches in pool.map(list_remote, urls) for url in matches]
        if not listed:
            raise ConfigError(
                f"no shards (*.tar) at {path}: set data.path to a folder, a glob or a pattern that has them"
            )
        facts = list(pool.map(describe, listed))
    return [RemoteShard(url, size, tag, cache) for url, (size, tag) in zip(listed, facts, strict=True)]


def open_shard(shard: Shard) -> BinaryIO:
    """The tar, open for reading; a remote one is fetched into its cache."""
    if isinstance(shard, RemoteShard):
        return shard.open()
    try:
        return open(regular(shard), "rb")
    except OSError as error:
        raise DataError(f"cannot open shard {shard} ({error.strerror}): restore it or make it readable") from error


def _stored(shard: Shard) -> Columns | None:
    """The columns of a shard from the cache; None if they are missing or damaged."""
    try:
        with np.load(_cache_file(shard), allow_pickle=False) as stored:
            return {name: stored[name] for name in _COLUMNS}
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _cached(shard: Shard) -> Columns:
    """The columns of a shard, indexed once per machine: other processes wait for the lock and read the cache."""
    columns = None
    try:
        cache = _cache_file(shard)
        with exclusive(cache.parent / "indexing", cache.name):
            columns = _stored(shard)
            if columns is None:
                columns = _index_one(shard)
                with atomic_write(cache) as file:
                    np.savez(file, **columns)  # pyright: ignore[reportArgumentType]
    except (OSError, RuntimeError) as error:
        # the same text for every shard, so that Python shows it once
        warnings.warn(
            f"the index of the shards could not be kept ({reason_of(error)}), so the next "
            "run indexes them again: point XDG_CACHE_HOME to a writable folder",
            TreadWarning,
            stacklevel=2,
        )
    return _index_one(shard) if columns is None else columns


def _cache_file(shard: Shard) -> Path:
    if isinstance(shard, RemoteShard):
        identity = f"{_FORMAT}\0{shard.url}\0{shard.size}\0{shard.tag}"
    else:
        stat = shard.stat()
        identity = f"{_FORMAT}\0{shard.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return cache_folder() / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"


def _index_one(shard: Shard) -> dict[str, np.ndarray]:
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


def _members(file: BinaryIO, shard: Shard) -> Iterator[tuple[str, int, int]]:
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
        refused = compressed_tar(str(shard))
        raise DataError(f"{broken} ({error}): {advice}" if refused is None else f"shard {shard} {refused}") from error
    file.seek(end)
    if file.read(_BLOCK) != bytes(_BLOCK):
        raise DataError(f"{broken} (no end mark after byte {end}): {advice}")


def _read_label(file: BinaryIO, offset: int, size: int, name: str) -> int:
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
