"""Files that are whole or absent.

- `atomic_write` gives a file its name only when it is complete and on the disk: a temporary name beside it, fsync,
  rename. Several processes may write the same file at once; the last to finish wins. `write_text` is it for a string.
- `sweep` removes the temporary files of killed processes.
- `exclusive` lets one process of a machine at a time do a thing; the system gives the lock back where one is killed.
- `unwritable` says whether a folder can be written in, or made, without making it.
- `writing` turns the failure of a write, which names no file where the disk is full, into a sentence that does.
- `is_file` and `is_folder` answer for any text: no file has a name that the file system does not take. `regular` keeps
  readers from a pipe or a device, which may never end.
- `visible` walks a folder as all readers of images do: through links to folders, past hidden names.
- `is_safetensors` tells whether a file of tensors that came from elsewhere is as long as its header says.
- `compressed_tar` refuses a tar that only a stream could read, by its name.
"""

import errno
import hashlib
import os
import re
import tempfile
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, BinaryIO

from tread.errors import OutputError, reason_of

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp", re.DOTALL)
"""Names of the temporary files of `atomic_write`."""


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` only when it is complete and on the disk."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with writing(path):
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the rename itself lives in the folder
        fsync(path.parent)


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Write a text file by `atomic_write`, in UTF-8; `errors` as in `str.encode`."""
    with atomic_write(path) as file:
        file.write(text.encode(errors=errors))


def unwritable(folder: Path) -> str | None:
    """The reason why no file can be written in a folder, which need not exist yet; None if one can."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return reason_of(error)


def sweep(folder: Path) -> None:
    """Remove what `atomic_write` left in a folder when its process was killed; only for whoever holds its lock."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError):  # what cannot be removed harms nobody
            if TEMPORARY.fullmatch(path.name):
                path.unlink()


LOCKS = 256
"""Lock files of a folder: names share them by their hash, so that locks of a million names leave no million files."""


@contextmanager
def exclusive(folder: Path, name: str, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of `name` in `folder`, alone among threads and processes; False, without `wait`: another has it.

    Two names may share a lock, so nobody holds one while it asks for another and waits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    slot = int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:4]) % LOCKS
    with (folder / f".lock-{slot:02x}").open("a") as file:
        held = lock(file, wait=wait)
        try:
            yield held
        finally:
            if held:
                _unlock(file)


def lock(file: IO[str], *, wait: bool) -> bool:
    """Lock an open file until it is closed, by every process that has it; False, without `wait`: another has the lock.

    True where the system or the file system has no locks.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows; a file system without locks
        pass
    return True


def _unlock(file: IO[str]) -> None:
    """Give a lock back at once: a process that was forked meanwhile has the file open too."""
    with suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the error of a write inside into an OutputError that names `path`, a file or a folder."""
    try:
        yield
    except OutputError:  # an inner one knows better
        raise
    except Exception as error:
        from safetensors import SafetensorError

        if not isinstance(error, OSError | SafetensorError):
            raise
        reason = reason_of(error)
        raise OutputError(
            f"cannot write {path} ({reason}): free space, make it writable, or name another folder.", reason
        ) from error


def cache_folder() -> Path:
    """The user's folder for cached indices and weights; `XDG_CACHE_HOME` moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tread"


def fsync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_file(path: str | Path) -> bool:
    """Whether there is a regular file; False for a name that the file system does not take."""
    with suppress(OSError, ValueError):
        return Path(path).is_file()
    return False


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder; False for a name that the file system does not take."""
    with suppress(OSError, ValueError):
        return Path(path).is_dir()
    return False


def regular(path: Path) -> Path:
    """The path, if it is not that of a pipe, a socket or a device: opening one may wait for ever."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


def visible(folder: Path, apart: Collection[str] = (), above: tuple[str, ...] = ()) -> Iterator[tuple[Path, list[str]]]:
    """A folder and each below it, with the names of its files, without what is hidden.

    Links to folders are followed, but not into one of the folders that contain them, `above`. `apart` are the absolute
    paths of subfolders that are left out.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    for _, subfolders, names in islice(os.walk(folder), 1):
        yield folder, [name for name in names if not name.startswith(".")]
        for name in subfolders:
            if not name.startswith(".") and os.path.abspath(folder / name) not in apart:
                yield from visible(folder / name, apart, (*above, real))


def files_below(folder: Path, apart: Collection[str] = ()) -> list[Path]:
    """All files in a folder and its subfolders as `visible` walks them, sorted."""
    return sorted(parent / name for parent, names in visible(folder, apart) for name in names)


def is_safetensors(path: Path) -> bool:
    """Whether a safetensors file is there and as long as its header says; its values are not read."""
    from safetensors import SafetensorError, safe_open

    with suppress(OSError, SafetensorError), safe_open(path, framework="pt"):
        return True
    return False


COMPRESSED_TARS = {
    ".tar.gz": "gunzip",
    ".tgz": "gunzip",
    ".tar.bz2": "bunzip2",
    ".tar.xz": "unxz",
    ".tar.zst": "unzstd",
}
"""End of a compressed tar's name -> the command that decompresses it."""


def compressed_tar(name: str) -> str | None:
    """What to say of a tar that is compressed, by its name; None if it is not.

    >>> compressed_tar("shard-000.tgz")
    'is compressed, and samples are read by their offset in a plain tar: decompress it (gunzip) to a .tar'
    """
    tool = next((tool for end, tool in COMPRESSED_TARS.items() if name.lower().endswith(end)), None)
    if tool is None:
        return None
    return f"is compressed, and samples are read by their offset in a plain tar: decompress it ({tool}) to a .tar"
