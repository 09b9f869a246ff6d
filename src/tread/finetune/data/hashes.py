"""Hashes that name cached items: of the content of files, and of the encoders.

- A file is hashed once: path, size and modification time are stored with the hash, so that the next start reads no
  content. Each process stores its hashes in a file of its own and reads those of all processes.
- Weights of encoders are too large to hash whole at every start: the size and a few evenly spaced pieces of each file
  are enough to distinguish two models. A model on the hub is identified by its commit.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from tread.data.captioned.tables import Media
from tread.files import files_below, regular, write_text
from tread.finetune.model.source import Source
from tread.together import gathered

_PIECE, _PIECES, _DIGEST = 65536, 8, 20
"""Bytes of a piece, pieces of a file, bytes of a hash."""


class Ranks(Protocol):
    """The processes of a run: the part of `accelerate.Accelerator` that the cache uses."""

    @property
    def process_index(self) -> int: ...

    @property
    def num_processes(self) -> int: ...


class Alone:
    """`Ranks` of a single process."""

    process_index, num_processes = 0, 1


def digest(*words: object) -> str:
    """The hash of a sequence of words, 40 hex digits.

    >>> digest("a", "bc") == digest("ab", "c")
    False
    """
    return hashlib.blake2b(json.dumps([str(word) for word in words]).encode(), digest_size=_DIGEST).hexdigest()


class ContentHashes:
    """Hashes of the content of files, stored in `folder`; all processes call `of` together."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks

    def of(self, files: Iterable[Media], *, progress: bool = True) -> dict[Media, str]:
        """The hash of each file or table cell; one that cannot be read is left out."""
        unique = list(dict.fromkeys(files))
        rank, known = self.ranks.process_index, self._remembered()
        share = unique[rank :: self.ranks.num_processes]
        new = [media for media in share if _state(media) not in known]
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            results = pool.map(content_hash, new)
            shown = tqdm(results, total=len(new), desc="hashing", unit="file", disable=not progress or not new)
            hashed = {_state(media): value for media, value in zip(new, shown, strict=True) if value is not None}
        if hashed:
            self._remember(hashed)
        gathered(None)
        known = self._remembered()
        return {media: known[state] for media in unique if (state := _state(media)) in known}

    def _remembered(self) -> dict[tuple[str, int, int], str]:
        known: dict[tuple[str, int, int], str] = {}
        for file in self.folder.glob("hashes-*.json"):
            known |= {(path, size, time): value for path, (size, time, value) in _read(file).items()}
        return known

    def _remember(self, found: dict[tuple[str, int, int], str]) -> None:
        file = self.folder / f"hashes-{self.ranks.process_index}.json"
        entries = _read(file) | {path: [size, time, value] for (path, size, time), value in found.items()}
        write_text(file, json.dumps(entries))


def identity(source: Source, parts: Sequence[str], *words: object) -> str:
    """The hash of a pipeline's parts, independent of their path; `words` are settings that change the encoding."""
    folder = Path(source.name_or_path)
    if folder.is_dir():
        files = [path for part in parts for path in files_below(folder / part)]
        weights = [f"{path.relative_to(folder).as_posix()} {_hash_pieces(path)}" for path in files]
    else:
        weights = [source.name_or_path, _commit(source) or source.revision]
    return digest(source.pipeline_name, *parts, *words, *weights)


def _commit(source: Source) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source.name_or_path, "model_index.json", revision=source.revision)
    return Path(path).parent.name if isinstance(path, str) else None


def _read(file: Path) -> dict[str, Any]:
    """The stored hashes; empty if the file is damaged: its entries are then hashed again."""
    try:
        stored = json.loads(file.read_bytes())
        return {path: [int(size), int(time), str(value)] for path, (size, time, value) in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def _state(media: Media) -> tuple[str, int, int]:
    """Path, size and modification time of a file, or the identity of a cell: the key of a stored hash."""
    if not isinstance(media, Path):
        return media.identity, 0, 0
    try:
        stat = media.stat()
    except OSError:
        return str(media.absolute()), -1, -1
    return str(media.absolute()), stat.st_size, stat.st_mtime_ns


def content_hash(media: Media) -> str | None:
    """The hash of a file or of a cell; None if it cannot be read."""
    if not isinstance(media, Path):
        return hashlib.blake2b(media.read(), digest_size=_DIGEST).hexdigest()
    try:
        with open(regular(media), "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST)).hexdigest()
    except OSError:
        return None


def _hash_pieces(path: Path) -> str:
    size = path.stat().st_size
    content = hashlib.blake2b(str(size).encode(), digest_size=_DIGEST)
    with open(path, "rb") as file:
        for piece in range(_PIECES):
            file.seek(piece * max(0, size - _PIECE) // (_PIECES - 1))
            content.update(file.read(_PIECE))
    return content.hexdigest()
