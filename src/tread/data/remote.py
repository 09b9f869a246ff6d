"""Remote files: list, describe and download them, with retries and a timeout.

- Protocols come from fsspec (`s3://`, `gs://`, `hf://`, ...), which names the package that it needs. HTTP uses Python's
  own client: fsspec's needs aiohttp and an event loop in a thread, which forked data workers do not inherit.
- A request that is refused, stalls or ends early is retried with exponential backoff, `TRIES` attempts in all, and then
  raises a RemoteError. An attempt times out after `STALLED` seconds without a byte, whatever its library's own timeout.
- A file's tag (ETag, checksum or time of its last change) and its size tell whether it has changed.
"""

import glob
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from tread.errors import ConfigError, OutputError, RemoteError, one_line
from tread.files import compressed_tar, writing

TRIES = 5
PAUSE = 1.0
"""Seconds before the second attempt; doubled before each further one."""
STALLED = 60.0
"""Seconds without a byte after which an attempt times out."""
CHUNK = 2**20
TAGS = ("ETag", "etag", "md5Hash", "checksum", "Last-Modified", "LastModified", "last_modified", "mtime", "created")
"""Headers and fsspec fields that hold a file's tag; the first that is set is used."""
_AHEAD = 8  # chunks queued for writing
Result = TypeVar("Result")


class Facts(NamedTuple):
    """Size and tag of a remote file."""

    size: int
    tag: str


def is_remote(path: object) -> bool:
    """Whether a path is a URL that has to be fetched; `file://` does not count."""
    text = str(path)
    return "://" in text and not text.startswith("file://")


def list_remote(url: str) -> list[str]:
    """The tars that a URL without braces expands to: itself, the matches of a glob, or the tars in a folder."""
    name = url.partition("?")[0]
    if (refused := compressed_tar(name)) is not None:
        raise ConfigError(f"data.path {url} {refused}")
    if not glob.has_magic(name) and name.endswith(".tar"):
        return [url]
    if _is_http(url):
        raise ConfigError(
            f"data.path {url} needs a listing, which HTTP does not have: name the shards, as in "
            "https://host/shard-{000..127}.tar"
        )

    def listed() -> Iterator[list[str]]:
        system, path = _system(url)
        pattern = path if glob.has_magic(path) else f"{path.rstrip('/')}/*.tar"
        yield sorted(system.unstrip_protocol(name) for name in system.glob(pattern))

    return _attempt(f"cannot list the shards at {url}", lambda: next(_watched(listed)))


def describe(url: str) -> Facts:
    """Ask the server for the size and tag of a file."""

    def asked() -> Iterator[dict[str, Any]]:
        if _is_http(url):
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=STALLED) as response:
                yield {**response.headers, "size": response.headers.get("Content-Length")}
        else:
            system, path = _system(url)
            yield system.info(path)

    facts = _attempt(f"cannot reach {url}", lambda: next(_watched(asked)))
    if facts.get("size") is None:
        raise RemoteError(f"the server does not tell the size of {url}, so a part could pass for the whole: copy it")
    return Facts(int(facts["size"]), next((str(facts[name]) for name in TAGS if facts.get(name)), ""))


def download(url: str, file: BinaryIO, size: int) -> None:
    """Write a remote file of `size` bytes into `file`; each attempt starts at offset 0."""

    def copied() -> None:
        arrived = file.seek(0)
        for chunk in _watched(lambda: _chunks(url)):
            arrived += len(chunk)
            if arrived > size:
                break
            with writing(Path(file.name)):
                file.write(chunk)
        if arrived != size:
            raise EOFError(f"{arrived:,} bytes came and it has {size:,}")

    _attempt(f"cannot fetch {url}", copied)


def _attempt(what: str, do: Callable[[], Result]) -> Result:
    """The result of `do`, attempted up to `TRIES` times; if all fail, a RemoteError that begins with `what`."""
    reason: Exception | None = None
    for trial in range(TRIES):
        if trial:
            time.sleep(PAUSE * 2 ** (trial - 1))
        try:
            return do()
        except (OutputError, ImportError):  # a full disk or a missing package: a retry changes nothing
            raise
        except Exception as error:  # each file system raises its own types
            reason = error
    assert reason is not None
    raise RemoteError(
        f"{what} ({one_line(reason)}), tried {TRIES} times: look whether it answers, then start again"
    ) from reason


def _watched(source: Callable[[], Iterator[Result]]) -> Iterator[Result]:
    """The items of `source()`, produced in a thread; a TimeoutError if the next one takes longer than `STALLED`.

    A thread blocked on a dead server cannot be stopped, so it is abandoned; being a daemon, it ends with the process.
    """
    items: queue.Queue[tuple[str, Any]] = queue.Queue(_AHEAD)
    left = threading.Event()

    def put(kind: str, item: Any) -> None:
        while not left.is_set():
            try:
                return items.put((kind, item), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in source():
                put("item", item)
                if left.is_set():
                    return
            put("end", None)
        except BaseException as error:  # re-raised in the consumer
            put("error", error)

    threading.Thread(target=work, name="tread-remote", daemon=True).start()
    try:
        while True:
            try:
                kind, item = items.get(timeout=STALLED)
            except queue.Empty:
                raise TimeoutError(f"no answer for {STALLED:g} seconds") from None
            if kind == "error":
                raise item
            if kind == "end":
                return
            yield item
    finally:
        left.set()


def _chunks(url: str) -> Iterator[bytes]:
    if _is_http(url):
        with urllib.request.urlopen(url, timeout=STALLED) as response:
            while chunk := response.read(CHUNK):
                yield chunk
    else:
        system, path = _system(url)
        with system.open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path on it; fsspec makes a new one after a fork."""
    import fsspec.core

    return fsspec.core.url_to_fs(url)
