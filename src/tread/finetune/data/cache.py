"""The on-disk cache of encoded samples, shared by processes and runs: `Cache` stores items, `CachedSamples` reads them.

- An item is a safetensors file named by a hash of everything that its content depends on (`hashes.digest`): a changed
  image, caption or setting gives a new item, so nothing is ever overwritten or stale.
- Files are written atomically, so a killed run resumes encoding with the first missing item. A file that cannot be
  opened is encoded again.
- If an item cannot be encoded, a `.skipped` file in its place has the reason, for all processes to read.
- `CachedSamples` is stateless: a `Pick` gives the same tensors in every worker and rank, and after a resume. A dropped
  caption is the empty caption, encoded like any other.
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

from tread.data.captioned.buckets import Bucket, BucketOrder
from tread.data.captioned.samples import Sample
from tread.errors import ConfigError, DataError, printable, reason_of
from tread.files import atomic_write, unwritable
from tread.finetune.data.hashes import Alone, ContentHashes, Ranks, digest
from tread.finetune.data.picks import Pick
from tread.finetune.family import reference_name

ItemKind = Literal["latents", "weights", "text"]
"""Latents of a picture, loss weights of a mask, or embeddings of a caption; also the name of the subfolder."""
Tensors = dict[str, Tensor]

FORMAT = 1
"""Version of the stored tensors, part of every key; raise it when their content changes."""
_STALE = 3600
"""Seconds after which a temporary file cannot belong to a running process."""


class Cache:
    """A folder of items by kind and key; `ranks` are the processes that share it (an Accelerator)."""

    def __init__(self, folder: str | Path, ranks: Ranks | None = None) -> None:
        self.folder, self.ranks = Path(folder), ranks or Alone()
        self.is_main = self.ranks.process_index == 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_folder(folder, reason_of(error)) from error
        if self.is_main:
            self._sweep()
        self.hashes = ContentHashes(self.folder, self.ranks)

    def path(self, kind: ItemKind, key: str) -> Path:
        """The path of an item, whether it exists or not."""
        return self.folder / kind / key[:2] / f"{key}.safetensors"

    def has(self, kind: ItemKind, key: str) -> bool:
        """Whether an item exists and can be opened."""
        try:
            with safe_open(self.path(kind, key), "pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def load(self, kind: ItemKind, key: str) -> Tensors:
        """The tensors of an item, mapped from its file."""
        try:
            return load_file(self.path(kind, key))
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{self.path(kind, key)} cannot be read ({error}): resume the run to encode it again"
            ) from error

    def write(self, kind: ItemKind, key: str, tensors: Tensors) -> None:
        """Store an item."""
        path = self.path(kind, key)
        self._put(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))
        path.with_suffix(".skipped").unlink(missing_ok=True)

    def skip(self, kind: ItemKind, key: str, reason: str) -> None:
        """Record for all processes why an item cannot be encoded."""
        self._put(self.path(kind, key).with_suffix(".skipped"), printable(reason).encode())

    def why_not(self, kind: ItemKind, key: str) -> str:
        """The reason recorded by `skip`; raises if there is none, where another process has its own folder."""
        try:
            return self.path(kind, key).with_suffix(".skipped").read_text(encoding="utf-8")
        except OSError:
            raise ConfigError(
                f"what another process encoded is not in cache_dir {str(self.folder)!r}: name a folder that all "
                "machines of the run share."
            ) from None

    def _put(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(content)
        except OSError as error:
            raise ConfigError(
                f"cannot write to cache_dir {str(self.folder)!r} ({error.strerror}): free space, or name another."
            ) from error

    def _sweep(self) -> None:
        """Remove temporary files that killed runs left behind."""
        for path in self.folder.glob("**/.*.tmp"):
            with suppress(OSError):  # another process has just renamed it
                if time.time() - path.stat().st_mtime > _STALE:
                    path.unlink()


def check_cache(folder: str) -> None:
    """Refuse a cache_dir that cannot be created, without making it; one that exists may hold all items already."""
    if not Path(folder).is_dir() and (reason := unwritable(Path(folder))):
        raise _no_folder(folder, reason)


def _no_folder(folder: str | Path, reason: str) -> ConfigError:
    return ConfigError(f"cache_dir {str(folder)!r} cannot be created ({reason}); name another folder.")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A sample in the cache: its bucket, and the keys of its items."""

    sample: Sample
    bucket: Bucket
    latents: str
    weight: str | None = None
    references: tuple[str, ...] = ()
    reference_buckets: tuple[Bucket, ...] = ()
    seen: tuple[str, ...] = ()
    """Keys of the pictures that the text encoder sees beside a caption; empty if it sees none."""
    loss_weight: float = 1.0
    """Factor of the sample's loss."""
    mirrored: "Entry | None" = None
    """The horizontally flipped sample, used in half of the visits; None: never flipped."""

    @property
    def sides(self) -> "tuple[Entry, ...]":
        """The entry, and the mirrored one if there is one."""
        return (self,) if self.mirrored is None else (self, self.mirrored)

    @property
    def group(self) -> tuple[Bucket, ...]:
        """The shapes of the sample and its references; samples of one group can be batched."""
        return self.bucket, *self.reference_buckets


class Texts:
    """The embeddings of encoded captions: `texts["a cat"]`."""

    def __init__(self, cache: Cache, identity: str) -> None:
        self.cache, self.identity = cache, identity

    def key(self, caption: str, seen: Sequence[str] = ()) -> str:
        """The key of a caption's item; `seen` are keys of the pictures that it was encoded with."""
        return digest(FORMAT, caption, self.identity, *seen)

    def of(self, caption: str, seen: Sequence[str]) -> Tensors:
        """The embeddings of a caption that was encoded together with pictures."""
        return self.cache.load("text", self.key(caption, seen))

    def __getitem__(self, caption: str) -> Tensors:
        return self.of(caption, ())


class CachedSamples(Dataset[tuple[Tensors, Tensors]]):
    """The latents and the text of a pick: `samples[Pick(i)]`, or `samples[i, dropped]`."""

    def __init__(self, cache: Cache, entries: Sequence[Entry], texts: Texts) -> None:
        self.cache, self.entries, self.texts = cache, entries, texts

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def groups(self) -> list[tuple[Bucket, ...]]:
        """Group of each sample: samples of one group can be batched."""
        return [entry.group for entry in self.entries]

    def order(self, batch: int, seed: int) -> BucketOrder:
        """The order of batches of `batch` samples, summed over all processes."""
        return BucketOrder(self.groups, [entry.sample.repeats for entry in self.entries], batch=batch, seed=seed)

    def __getitem__(self, pick: Pick | tuple[int, bool]) -> tuple[Tensors, Tensors]:
        pick = pick if isinstance(pick, Pick) else Pick(*pick)
        entry = self.entries[pick.sample]
        entry = entry.mirrored or entry if pick.mirrored else entry
        captions = entry.sample.captions
        caption = "" if pick.dropped else captions[pick.caption % len(captions)]
        latents = self._latents(entry.latents) | {"position": torch.tensor(pick.position)}
        if entry.loss_weight != 1:
            latents["loss_weight"] = torch.tensor(entry.loss_weight)
        if entry.weight is not None:
            weight = self.cache.load("weights", entry.weight)["weight"]  # (h, w)
            latents["weight"] = weight.expand(1, *latents["mean"].shape[1:])  # (1, h, w) or (1, f, h, w)
        for number, key in enumerate(entry.references):
            latents |= {f"{reference_name(number)}.{name}": tensor for name, tensor in self._latents(key).items()}
        return latents, self.texts.of(caption, entry.seen)

    def collate(
        self, items: Sequence[tuple[Tensors, Tensors]], collate_text: Callable[[Sequence[Tensors]], Tensors]
    ) -> Tensors:
        """One batch from samples of one group.

        It has a `weight` if any of them has a mask, and a `loss_weight` if any of theirs is not 1.
        """
        latents = [latents for latents, _ in items]
        if any("loss_weight" in one for one in latents):
            latents = [{"loss_weight": torch.tensor(1.0), **one} for one in latents]
        if any("weight" in one for one in latents):
            latents = [{"weight": torch.ones(1, *one["mean"].shape[1:]), **one} for one in latents]
        batch = {name: torch.stack([one[name] for one in latents]) for name in latents[0]}
        text = collate_text([text for _, text in items])
        return batch | {f"text.{name}": tensor for name, tensor in text.items()}

    def _latents(self, key: str) -> Tensors:
        stored = self.cache.load("latents", key)
        return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in stored.items()}
