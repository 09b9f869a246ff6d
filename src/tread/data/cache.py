"""A folder of fetched shards, of bounded size, shared by the processes of a machine.

- A shard is fetched once: the process that fetches it holds its lock, and others wait. A killed process frees its lock.
- A shard is renamed into place only when it is complete (`files.atomic_write`) and has the size that the server told.
  The file name hashes URL, size and tag, so a shard that changes at its source is another file here.
- Before a shard is fetched, the least recently opened files are evicted to make room for it. A reader that has one of
  them open keeps it; the space is free when the last reader closes it. A download counts with its full size.
"""

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from tread.data.remote import download
from tread.errors import OutputError, RemoteError
from tread.files import TEMPORARY, atomic_write, exclusive, writing

_TRIES = 10
_PAUSE, _PAUSES = 0.2, 3000
"""Seconds between two attempts to reserve space, and the number of attempts."""


@dataclass(frozen=True)
class ShardCache:
    """A least-recently-used cache of at most `limit` bytes of shards in `folder`."""

    folder: Path
    limit: int

    def open(self, shard: "RemoteShard") -> BinaryIO:
        """Open the shard for reading; fetch it if it is not cached."""
        path = self.folder / shard.file
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                file = open(path, "rb")  # noqa: SIM115 - the caller closes it
                if os.fstat(file.fileno()).st_size == shard.size:
                    with suppress(OSError):  # another user's file, or evicted since it was opened
                        os.utime(path)
                    return file
                file.close()
            try:
                file = self._fetch(shard, path)
            except OutputError as error:  # a data worker cannot pass an OutputError on to the trainer
                raise RemoteError(str(error)) from error
            if file is not None:
                return file
        raise RemoteError(
            f"shard {shard} was removed from {self.folder} as often as it was fetched: raise data.cache_gb, which is "
            "too small for all who read here"
        )

    def holds(self, shard: "RemoteShard") -> bool:
        """Whether the complete shard is in the cache."""
        with suppress(OSError):
            return (self.folder / shard.file).stat().st_size == shard.size
        return False

    def _fetch(self, shard: "RemoteShard", path: Path) -> BinaryIO | None:
        """Fetch a shard and open it; None if another process fetched it first."""
        if shard.size > self.limit:
            raise RemoteError(
                f"shard {shard} has {shard.size:,} bytes, and the cache may have {self.limit:,}: raise data.cache_gb"
            )
        with writing(self.folder), exclusive(self.folder, shard.file):
            if self.holds(shard):
                return None
            with atomic_write(path) as file:
                for _ in range(_PAUSES):
                    if self._reserve(shard.size, file):
                        break
                    time.sleep(_PAUSE)  # only running downloads are left; once complete, they can be evicted
                else:
                    raise RemoteError(
                        f"no room for shard {shard} in {self.folder} within {_PAUSES * _PAUSE:g} seconds: raise "
                        "data.cache_gb, or empty the folder if other users' shards fill it"
                    )
                download(shard.url, file, shard.size)
                file.flush()
                return open(file.name, "rb")  # opened before the rename, after which it may be evicted at once

    def _reserve(self, size: int, file: BinaryIO) -> bool:
        """Evict files until `size` bytes fit, and reserve them by truncating `file` to that size.

        False if only running downloads are left to evict.
        """
        with exclusive(self.folder / ".room", ""):
            files = [(path, stat) for path in self.folder.iterdir() if (stat := _stat(path)) is not None]
            held = sum(stat.st_size for _, stat in files)
            for path, stat in sorted(files, key=lambda item: item[1].st_mtime_ns):
                if held + size <= self.limit:
                    break
                if TEMPORARY.fullmatch(path.name) and not self._is_left_over(path):
                    continue
                with suppress(OSError):
                    path.unlink()
                    held -= stat.st_size
            if held + size > self.limit:
                return False
            file.truncate(size)
            return True

    def _is_left_over(self, temporary: Path) -> bool:
        """Whether the process that wrote a temporary file has died, which has released its shard's lock."""
        shard = temporary.name.removeprefix(".").rsplit(".", 2)[0]
        with exclusive(self.folder, shard, wait=False) as free:
            return free


@dataclass(frozen=True)
class RemoteShard:
    """One version of a tar at a URL, and the cache that it is read through; `str()` is the URL."""

    url: str
    size: int
    tag: str
    cache: ShardCache

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return PurePosixPath(self.url.partition("?")[0]).name

    @property
    def file(self) -> str:
        """The name of this version in the cache."""
        identity = f"{self.url}\0{self.size}\0{self.tag}"
        return f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.tar"

    def open(self) -> BinaryIO:
        """The tar, open for reading."""
        return self.cache.open(self)


def _stat(path: Path) -> os.stat_result | None:
    """The stat of a file that counts towards the limit, a tar or a running download; None for any other file."""
    if not path.name.endswith((".tar", ".tmp")):
        return None
    with suppress(OSError):
        return path.stat()
    return None
