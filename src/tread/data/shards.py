"""`tread encode`: encodes images to latents, in the tar format that `latents.py` reads.

- A shard is a pure function of the sorted file list and the settings: shard k holds files
  k * shard_size .. (k + 1) * shard_size - 1, in fixed batches, with fixed tar headers. An unreadable file is
  left out of its shard and shifts no other. So a run killed at any moment and restarted keeps the finished
  shards and writes the same bytes as an uninterrupted run.
- `manifest.json` records the settings of the shards, and other settings are refused, so that a folder never
  mixes latents. The batch size may change, e.g. when memory runs out.
- Latents are stored unscaled in float16; they are scaled when loaded, by VAE name.
- Sample keys count the files: key N is line N + 1 of `files.txt`. Labels index `classes.json`.
- Pillow decodes in threads, one batch ahead of the VAE.
- Rank r of w writes shards r, r + w, r + 2w, ... without communication: ranks share only the folder, on one machine or
  several. A killed rank resumes like a killed run, and a resume may use another number of ranks.
"""

import hashlib
import io
import json
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tread.data.ahead import read_ahead
from tread.data.images import list_images, read_image
from tread.data.latents import StoredKind, sample_moments
from tread.data.readable import SKIPPED_FILE
from tread.data.vae import Autoencoder, Dtype, load_vae
from tread.errors import ConfigError, DataError, check_choice, printable
from tread.files import atomic_write, exclusive, write_text
from tread.routing import noise
from tread.words import counted

_ENCODE_WORD = int.from_bytes(b"enco")
_SHUFFLE_WORD = int.from_bytes(b"shuf")


@dataclass(frozen=True)
class Encoded:
    """The result of `encode`, with the settings to train on it; `str()` is the summary line."""

    out: Path
    shards: int
    written: int
    skipped: int
    settings: dict[str, str | int]
    missing: int = 0
    """Shards that other ranks have not written yet."""

    def __str__(self) -> str:
        if self.missing:
            there = f"{self.shards - self.missing} of {counted(self.shards, 'shard')}"
            return f"this rank is done; {there} are at {self.out}, and other ranks write the rest"
        skipped = f", {self.skipped} unreadable and listed in {self.out / SKIPPED_FILE}" if self.skipped else ""
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items())
        written = f"{counted(self.written, 'image')} in {counted(self.shards, 'shard')}"
        return f"{written} at {self.out}{skipped}; train with {settings}"


def encode(
    images: str | Path,
    vae: str | Path,
    out: str | Path,
    *,
    size: int = 256,
    kind: StoredKind = "moments",
    batch_size: int = 16,
    shard_size: int = 1000,
    dtype: Dtype = "float32",
    device: str | torch.device | None = None,
    seed: int = 0,
    shuffle: bool = False,
    rank: int | None = None,
    world: int | None = None,
) -> Encoded:
    """Encode a folder of images (class = subfolder) into tar shards of `latent.npy` and `cls`.

    `vae` is a folder or a hub id of an AutoencoderKL or AutoencoderTiny, or of a pipeline that has one.
    `kind="moments"` stores mean and logvar, so that every epoch draws new latents; `"sample"` stores one
    draw, seeded by `seed`, at half the size. An AutoencoderTiny has no moments. `dtype` is the VAE's compute
    dtype. `shuffle` puts the images in a random order, seeded by `seed`: training that reads a window of shards at a
    time then meets all classes in each. Called again with the same arguments, it resumes.

    `rank` and `world` share the shards among processes; by default they come from `torchrun`'s environment.
    """
    rank, world = _ranks(rank, world)
    for name, value in (("size", size), ("batch_size", batch_size), ("shard_size", shard_size)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    check_choice(kind, "kind", get_args(StoredKind))
    images, out = Path(images), Path(out)
    if out.resolve().is_relative_to(images.resolve()):
        raise ConfigError(f"the shards at {out} would lie among the images in {images}: choose another folder")
    files, labels, classes = list_images(images)
    if shuffle:
        order = noise.permutation(len(files), seed, _SHUFFLE_WORD).tolist()
        files, labels = [files[i] for i in order], [labels[i] for i in order]
    if device is None and torch.cuda.is_available():
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', rank)) % torch.cuda.device_count()}"
    model = load_vae(vae, dtype=dtype, device=device)
    _check_fits(vae, model, size, kind)
    manifest = {
        "vae": str(Path(vae).resolve()) if Path(vae).exists() else str(vae),
        "size": size,
        "kind": kind,
        "dtype": dtype,
        "seed": seed,
        "shard_size": shard_size,
        "images": len(files),
        "files_sha256": hashlib.sha256("\0".join(files).encode(errors="surrogateescape")).hexdigest(),
    }
    spans = [range(first, min(first + shard_size, len(files))) for first in range(0, len(files), shard_size)]
    shards = [out / f"shard-{n:06d}.tar" for n in range(len(spans))]
    _claim(out, manifest, files, classes, None if world == 1 else shards[rank::world])

    writer = _Writer(
        images=images,
        files=files,
        labels=labels,
        model=model,
        dtype=dtype,
        size=size,
        kind=kind,
        batch_size=batch_size,
        seed=seed,
    )
    writer.write_missing(dict(zip(shards[rank::world], spans[rank::world], strict=True)), progress=rank == 0)
    missing = sum(not shard.exists() for shard in shards)
    skipped = _read_skipped(out)
    if len(skipped) == len(files):
        raise DataError(f"none of {counted(len(files), 'image')} in {images} could be read: see {out / SKIPPED_FILE}")
    return Encoded(
        out=out,
        shards=len(spans),
        written=len(files) - len(skipped),
        skipped=len(skipped),
        settings={"data.path": str(out), "data.vae": model.name, "data.kind": kind, "data.num_classes": len(classes)},
        missing=missing,
    )


@dataclass(frozen=True, kw_only=True)
class _Writer:
    """Writes the shards of one job."""

    images: Path
    files: list[str]
    labels: list[int]
    model: Autoencoder
    dtype: Dtype
    size: int
    kind: StoredKind
    batch_size: int
    seed: int

    def write_missing(self, shards: dict[Path, range], progress: bool) -> None:
        """Write those of the shards, each with the files of its range, that are not there yet."""
        todo = {shard: span for shard, span in shards.items() if not shard.exists()}
        count, left = (sum(map(len, some.values())) for some in (shards, todo))
        with (
            ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool,
            tqdm(total=count, initial=count - left, desc="encoding", unit="image", disable=not progress) as bar,
        ):
            for shard, span in todo.items():
                self._write(shard, span, pool, bar)

    def _write(self, shard: Path, span: range, pool: ThreadPoolExecutor, bar: tqdm) -> None:
        """Encode the files of `span` into a shard; those that cannot be read are listed beside it."""
        skipped: dict[str, str] = {}
        with atomic_write(shard) as file, tarfile.open(fileobj=file, mode="w") as tar:
            for batch, results in read_ahead(pool, self._read, span, self.batch_size):
                pixels = {p: r for p, r in zip(batch, results, strict=True) if isinstance(r, np.ndarray)}
                skipped |= {self.files[p]: str(r) for p, r in zip(batch, results, strict=True) if p not in pixels}
                for i, latent in self._latents(pixels).items():
                    _add(tar, f"{i:08d}.cls", str(self.labels[i]).encode())
                    _add(tar, f"{i:08d}.latent.npy", _npy(latent))
                bar.update(len(batch))
            # before the rename: a resume skips finished shards, so a kill in between would lose the list
            _write_skipped(shard.parent, {self.files[i] for i in span}, skipped)

    def _read(self, index: int) -> np.ndarray | DataError:
        path = self.images / self.files[index]
        try:
            return read_image(path, self.size)
        except DataError as error:
            if not path.exists():  # a lost disk is not a folder of bad images
                raise DataError(f"image {path} has disappeared: restore it and resume") from error
            return error

    def _latents(self, pixels: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Encode a batch: {file index: uint8 (H, W, 3)} -> {file index: float16 (C or 2C, h, w)}."""
        if not pixels:
            return {}
        x = torch.from_numpy(np.stack(list(pixels.values()))).permute(0, 3, 1, 2)  # (B, 3, H, W)
        latents: Tensor = self.model.encode(x.float() / 127.5 - 1)  # (B, C or 2C, h, w)
        if self.kind == "sample" and self.model.has_moments:
            latents = sample_moments(latents, self.seed, _ENCODE_WORD, torch.tensor(list(pixels)))  # (B, C, h, w)
        by_file = dict(zip(pixels, latents.half().cpu().numpy(), strict=True))
        for i, latent in by_file.items():
            if not np.isfinite(latent).all():
                raise DataError(
                    f"the VAE gives NaN or infinite latents for {self.images / self.files[i]} in {self.dtype}: "
                    "encode with dtype float32, or remove the image"
                )
        return by_file


def _ranks(rank: int | None, world: int | None) -> tuple[int, int]:
    """Rank and world size: the arguments, else the environment, else a single process."""
    if (rank is None) != (world is None):
        raise ConfigError("rank and world go together: give both, or neither where torchrun sets them")
    if rank is None or world is None:
        rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if not 0 <= rank < world:
        raise ConfigError(f"rank is {rank} of a world of {world}; ranks are 0 .. world - 1")
    return rank, world


def _check_fits(vae: str | Path, model: Autoencoder, size: int, kind: StoredKind) -> None:
    if kind == "moments" and not model.has_moments:
        raise ConfigError(f"{vae} is an AutoencoderTiny, which has no moments: use --kind sample")
    if size % model.factor:
        raise ConfigError(f"size is {size}; it must be a multiple of {model.factor}, by which {vae} shrinks images")


def _claim(out: Path, manifest: dict[str, Any], files: list[str], classes: list[str], own: list[Path] | None) -> None:
    """Create `out` for this job, or check that it belongs to it.

    Temporary files of a killed process are removed; with several ranks, only those of this rank's `own` shards.
    """
    path = out / "manifest.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            there = json.loads(path.read_text())
            differ = [f"{k} {there.get(k)} there, {v} here" for k, v in manifest.items() if there.get(k) != v]
            if differ:
                raise ConfigError(
                    f"{out} holds shards of another job ({'; '.join(differ)}): choose another folder or delete it"
                )
        elif any(out.glob("*.tar")) and not path.exists():  # another rank may have written the manifest by now
            raise ConfigError(f"{out} holds shards that tread encode did not write: choose another folder")
        names = None if own is None else {shard.name for shard in own}
        for left_over in out.glob(".*.tmp"):
            if names is None or left_over.name[1:].rsplit(".", 2)[0] in names:
                left_over.unlink(missing_ok=True)
        write_text(out / "files.txt", "".join(f"{file}\n" for file in files), errors="surrogateescape")
        named = json.dumps(classes, indent=2, ensure_ascii=False)
        write_text(out / "classes.json", printable(named) + "\n")  # an escape of JSON's too
        write_text(path, json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write to {out} ({error.strerror}): choose another folder") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is damaged ({error}): delete {out} and encode again") from error


def _npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file with the fixed metadata of WebDataset's writer; TarInfo's default mtime is 0."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.uname, info.gname = len(data), 0o444, "bigdata", "bigdata"
    tar.addfile(info, io.BytesIO(data))


def _read_skipped(out: Path) -> dict[str, str]:
    path = out / SKIPPED_FILE
    text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
    return {file: why for file, _, why in (line.partition("\t") for line in text.split("\n")[:-1])}


def _write_skipped(out: Path, span: set[str], skipped: dict[str, str]) -> None:
    """List the unreadable files of one shard, replacing its earlier entries."""
    with exclusive(out, SKIPPED_FILE):  # other ranks update the same file
        before = _read_skipped(out)
        now = {file: why for file, why in before.items() if file not in span} | skipped
        if now == before:
            return
        if now:
            lines = (f"{file}\t{now[file]}\n" for file in sorted(now))
            write_text(out / SKIPPED_FILE, "".join(lines), errors="surrogateescape")
        else:
            (out / SKIPPED_FILE).unlink(missing_ok=True)
