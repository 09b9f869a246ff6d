"""A folder of tensors on disk, shared by all processes of a run and by all runs.

- One safetensors file per item, named after everything that its content depends on (`hashes.digest`): a changed image,
  caption or setting is a new item; nothing is ever overwritten or out of date.
- A file is written whole or not at all, so a run that is killed at any moment goes on where it stopped. What exists
  is opened before it is trusted; what does not open is made again.
- Why an item cannot be made is written beside its place, so that every process knows.
- `CachedSamples` reads samples back: a plain map from a `Pick`, so that workers, ranks and resumes change nothing. A
  dropped caption is the empty one, encoded like any other.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from torch.utils.data import Dataset

from tread.data.captioned.buckets import Bucket
from tread.data.captioned.samples import Sample
from tread.errors import ConfigError, DataError
from tread.files import atomic_write
from tread.finetune.data.hashes import Alone, ContentHashes, Ranks, digest
from tread.finetune.data.picks import Pick

Kind = Literal["latents", "weights", "text"]
Tensors = dict[str, Tensor]

FORMAT = 1
"""Part of every name; to be raised when what is stored changes."""
_STALE = 3600


class Cache:
    """A folder of tensors by name. `ranks` are the processes that share it (an Accelerator)."""

    def __init__(self, folder: str | Path, ranks: Ranks | None = None) -> None:
        self.folder, self.ranks = Path(folder), ranks or Alone()
        self.is_main = self.ranks.process_index == 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cache_dir {str(folder)!r} cannot be made ({error.strerror}); name another.") from error
        if self.is_main:
            self._sweep()
        self.hashes = ContentHashes(self.folder, self.ranks)

    def path(self, kind: Kind, key: str) -> Path:
        """Where an item lies, or would."""
        return self.folder / kind / key[:2] / f"{key}.safetensors"

    def has(self, kind: Kind, key: str) -> bool:
        """Whether an item is there and whole."""
        try:
            with safe_open(self.path(kind, key), "pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def load(self, kind: Kind, key: str) -> Tensors:
        """The tensors of an item, mapped from its file."""
        try:
            return load_file(self.path(kind, key))
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{self.path(kind, key)} cannot be read ({error}): go on with the run to encode it again"
            ) from error

    def write(self, kind: Kind, key: str, tensors: Tensors) -> None:
        """Store an item."""
        path = self.path(kind, key)
        self._put(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        path.with_suffix(".skipped").unlink(missing_ok=True)

    def skip(self, kind: Kind, key: str, reason: str) -> None:
        """Say to all processes why there is no such item."""
        self._put(self.path(kind, key).with_suffix(".skipped"), reason.encode())

    def why_not(self, kind: Kind, key: str) -> str:
        """The reason that `skip` was given."""
        try:
            return self.path(kind, key).with_suffix(".skipped").read_text()
        except OSError:
            return f"it is not in {self.folder}: the processes of a run must share one cache_dir"

    def _put(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(content)
        except OSError as error:
            raise ConfigError(
                f"cannot write to cache_dir {str(self.folder)!r} ({error.strerror}): make room there, or name another."
            ) from error

    def _sweep(self) -> None:
        """Remove what killed runs left half written, and what no run can still be writing."""
        for path in self.folder.glob("**/.*.tmp"):
            with suppress(OSError):  # another process has just finished it
                if time.time() - path.stat().st_mtime > _STALE:
                    path.unlink()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A sample that is in the cache: its size, and the names of its items."""

    sample: Sample
    bucket: Bucket
    latents: str
    weight: str | None = None
    reference: str | None = None
    reference_bucket: Bucket | None = None

    @property
    def group(self) -> tuple[Bucket, Bucket | None]:
        """Samples of one group can be in one batch."""
        return self.bucket, self.reference_bucket


class Texts:
    """What a model reads of each caption that was encoded: `texts["a cat"]`."""

    def __init__(self, cache: Cache, identity: str) -> None:
        self.cache, self.identity = cache, identity

    def key(self, caption: str) -> str:
        """The name of a caption's item."""
        return digest(FORMAT, caption, self.identity)

    def __getitem__(self, caption: str) -> Tensors:
        return self.cache.load("text", self.key(caption))


class CachedSamples(Dataset[tuple[Tensors, Tensors]]):
    """`samples[Pick(i)]`, or `samples[i, dropped]`, is the latents and the text of a visit to sample i."""

    def __init__(self, cache: Cache, entries: Sequence[Entry], texts: Texts) -> None:
        self.cache, self.entries, self.texts = cache, entries, texts

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def groups(self) -> list[tuple[Bucket, Bucket | None]]:
        """For `BucketOrder`: samples of one group can be in one batch."""
        return [entry.group for entry in self.entries]

    @property
    def repeats(self) -> list[int]:
        """For `BucketOrder`: how often an epoch visits each sample."""
        return [entry.sample.repeats for entry in self.entries]

    def __getitem__(self, pick: Pick | tuple[int, bool]) -> tuple[Tensors, Tensors]:
        pick = pick if isinstance(pick, Pick) else Pick(*pick)
        entry = self.entries[pick.sample]
        captions = entry.sample.captions
        caption = "" if pick.dropped else captions[pick.caption % len(captions)]
        latents = self._latents(entry.latents) | {"position": torch.tensor(pick.position)}
        if entry.weight is not None:
            weight = self.cache.load("weights", entry.weight)["weight"]  # (h, w)
            latents["weight"] = weight.expand(1, *latents["mean"].shape[1:])  # (1, h, w) or (1, f, h, w)
        if entry.reference is not None:
            latents |= {f"reference.{name}": tensor for name, tensor in self._latents(entry.reference).items()}
        return latents, self.texts[caption]

    def collate(
        self, items: Sequence[tuple[Tensors, Tensors]], collate_text: Callable[[Sequence[Tensors]], Tensors]
    ) -> Tensors:
        """One batch of visits to samples of one group; `weight` is there where any of them has a mask."""
        latents = [latents for latents, _ in items]
        if any("weight" in one for one in latents):
            latents = [{"weight": torch.ones(1, *one["mean"].shape[1:]), **one} for one in latents]
        batch = {name: torch.stack([one[name] for one in latents]) for name in latents[0]}
        text = collate_text([text for _, text in items])
        return batch | {f"text.{name}": tensor for name, tensor in text.items()}

    def _latents(self, key: str) -> Tensors:
        stored = self.cache.load("latents", key)
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
