"""Precomputed VAE latents in WebDataset tars, read as a map.

- The VAE's name in the config determines the channel count C and the scale and shift, (x - shift) * scale. Stored
  latents are unscaled unless `scaled` is set; `doubt` compares both readings by their standard deviation.
- `latent.npy` holds either a sampled latent (C, H, W) or moments (2C, H, W), mean then logvar. Which one is inferred
  from the first sample's channels and the VAE's C; with `vae="none"` there is no C, so `kind` must be set.
- `prepare` samples moments and scales, batched on the training device, with noise that depends only on the seed and the
  sample's position.
- Labels and shapes (by file size) are checked before training; NaN is reported when the sample is read.
- Each process opens its own files: a DataLoader worker never shares a file offset with its parent.
- Remote shards are read through a cache of bounded size. Where it cannot hold them all, `window` shards are shuffled
  together instead of all samples, and the next window is fetched while one is read.
"""

import io
import math
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from tread.data.cache import RemoteShard, ShardCache
from tread.data.dataset import Dataset
from tread.data.index import ShardIndex, index_shards, open_shard
from tread.data.order import Groups
from tread.errors import ConfigError, DataError, check_choice
from tread.files import cache_folder
from tread.routing import noise
from tread.words import counted

StoredKind = Literal["sample", "moments"]
Kind = Literal["auto", "sample", "moments"]

_MOMENTS_WORD = int.from_bytes(b"mome")
_OPEN_FILES = 128  # per process, below the usual limit of open files
_HEADERS = 64  # most parsed .npy headers kept
_FETCHED = 8  # concurrent downloads of the next window's shards
_GB = 10**9
_LOOKED_AT, _LOOKED_AT_BYTES = 1000, 2**26
_CLEARLY = 1.15
"""Factor by which the other reading's std has to be nearer to 1 before `doubt` warns."""


@dataclass(frozen=True)
class Scaling:
    """The affine map between an autoencoder's latents and the model's input."""

    channels: int | None
    scale: float
    shift: float = 0.0

    def to_model(self, latent: Tensor) -> Tensor:
        return (latent - self.shift) * self.scale

    def to_latent(self, x: Tensor) -> Tensor:
        """The inverse of `to_model`: the input of the VAE's decoder."""
        return x / self.scale + self.shift


VAES: dict[str, Scaling] = {
    "sd": Scaling(channels=4, scale=0.18215),
    "sdxl": Scaling(channels=4, scale=0.13025),
    "sd3": Scaling(channels=16, scale=1.5305, shift=0.0609),
    "flux": Scaling(channels=16, scale=0.3611, shift=0.1159),
    "none": Scaling(channels=None, scale=1.0),
}


class Latents(Dataset):
    """`Latents(path, vae="sd", num_classes=1000)[i]` is the stored array in float32 and the label.

    `path`: a folder of tars, one tar, a glob, or a brace pattern; or a URL that stands for them.
    """

    def __init__(
        self,
        path: Annotated[str | Path, "a folder of tars, one tar, a glob or shard-{000..127}.tar; or a URL of such"],
        *,
        vae: Annotated[str, "sd | sdxl | sd3 | flux | none: fixes channels, scale and shift"] = "sd",
        num_classes: Annotated[int, "labels are 0 .. num_classes - 1"] = 1000,
        kind: Annotated[Kind, "auto | sample | moments (mean and logvar, sampled anew every time)"] = "auto",
        scaled: Annotated[bool, "the latents were scaled before they were stored"] = False,
        window: Annotated[int | None, "shards whose samples are shuffled together; null: all"] = None,
        cache: Annotated[str | None, "folder for shards of a URL; null: tread/shards in the user's cache"] = None,
        cache_gb: Annotated[float, "the most that this folder may hold, in GB"] = 100.0,
    ) -> None:
        check_choice(vae, "data.vae", VAES)
        if num_classes < 1:
            raise ConfigError(f"data.num_classes is {num_classes}; it must be at least 1")
        if window is not None and window < 1:
            raise ConfigError(f"data.window is {window}; it must be at least 1 shard")
        if not cache_gb > 0:
            raise ConfigError(f"data.cache_gb is {cache_gb}; it must be more than 0")
        self.scaling, self.scaled = VAES[vae], scaled
        self.num_classes = num_classes
        folder = cache_folder() / "shards" if cache is None else Path(cache).expanduser()
        self._index = index_shards(path, ShardCache(folder, round(cache_gb * _GB)))
        self._window = window
        _check_cache(self._index, window, cache_gb)
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()
        self._headers: dict[bytes, tuple[np.dtype, tuple[int, ...], int]] = {}
        self._pid = os.getpid()
        _check_labels(self._index, num_classes)
        self._stored_shape = self._read(0).shape
        self._check_shapes()
        channels, height, width = self._stored_shape
        self.kind = decide_kind(kind, vae, channels)
        self.shape = (channels // 2 if self.kind == "moments" else channels, height, width)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        i = operator.index(index)
        latent = self._read(i)
        if latent.shape != self._stored_shape:
            raise self._shape_error(i, latent.shape)
        x = torch.from_numpy(latent.astype(np.float32))
        if not x.sum().isfinite() and not x.isfinite().all():  # the sum is quick, and may overflow
            raise DataError(
                f"sample {self._index.name(i)} has NaN or infinite values: encode it again (a VAE in float16 "
                "overflows, float32 does not) or remove it"
            )
        return x, int(self._index.label[i])

    def prepare(self, x: Tensor, seed: int, positions: Tensor) -> Tensor:
        if self.kind == "moments":
            x = sample_moments(x, seed, _MOMENTS_WORD, positions)  # (B, C, H, W)
        return x if self.scaled else self.scaling.to_model(x)

    def doubt(self) -> str | None:
        return " ".join(doubt for doubt in (self._doubted_scale(), self._doubted_classes()) if doubt) or None

    def _doubted_classes(self) -> str | None:
        """Warn of classes after the last one that has samples: nothing trains them, but they are drawn too."""
        classes = int(self._index.label.max()) + 1
        if classes == self.num_classes:
            return None
        return (
            f"data.num_classes is {self.num_classes}, but the largest label is {classes - 1}. Grids and evaluations "
            "draw all classes, of which the others stay untrained: "
            f"set data.num_classes={classes} if there are no more."
        )

    def _doubted_scale(self) -> str | None:
        """Warn if the std of the first latents would be clearly nearer to 1 with `scaled` inverted."""
        count = min(len(self), _LOOKED_AT, max(1, _LOOKED_AT_BYTES // int(self._index.size.max())))
        latents: list[Tensor] = []
        for i in range(count):
            with suppress(DataError):  # training skips an unreadable sample too
                latents.append(self[i][0])
        if not latents:
            return None
        now = float(self.prepare(torch.stack(latents), 0, torch.arange(len(latents))).std())
        other = now * self.scaling.scale if self.scaled else now / self.scaling.scale
        if min(now, other) <= 0 or abs(math.log(now)) <= abs(math.log(other)) + math.log(_CLEARLY):
            return None
        stored = "unscaled" if self.scaled else "scaled already"
        return (
            f"the model sees latents with a std of {now:.2f}; it would be {other:.2f} if they were stored {stored}. If "
            f"they were, set data.scaled={str(not self.scaled).lower()}."
        )

    def contents(self) -> Mapping[str, Iterable[object]]:
        index = self._index
        groups: dict[str, list[str]] = {shard.name: [] for shard in index.shards}
        for i, key in enumerate(index.key):
            groups[index.shards[index.shard[i]].name].append(f"{key!r} {index.size[i]} {index.label[i]}")
        return groups

    def groups(self) -> Groups | None:
        """One group per shard if `window` is set."""
        return None if self._window is None else Groups(torch.from_numpy(self._index.shard), self._window)

    def coming(self, groups: Sequence[int]) -> None:
        """Fetch the remote shards among `groups` in threads; an error is raised again when the shard is read."""
        shards = (self._index.shards[group] for group in groups)
        missing = [shard for shard in shards if isinstance(shard, RemoteShard) and not shard.cache.holds(shard)]
        for some in (missing[first::_FETCHED] for first in range(min(_FETCHED, len(missing)))):
            threading.Thread(target=_fetch_all, args=(some,), name="tread-fetch", daemon=True).start()

    @staticmethod
    def to_images(x: Tensor) -> Tensor:
        """The first three channels (or the first, if there are fewer), each image stretched to 0..255."""
        shown = (x[:, :3] if x.shape[1] >= 3 else x[:, :1]).float()  # (B, 3 or 1, H, W)
        low, high = shown.amin((1, 2, 3), keepdim=True), shown.amax((1, 2, 3), keepdim=True)  # (B, 1, 1, 1)
        pixels = 255 * (shown - low) / (high - low).clamp(min=1e-12)
        return pixels.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()  # (B, H, W, 3 or 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def _check_shapes(self) -> None:
        if len(self._stored_shape) != 3:
            raise DataError(
                f"sample {self._index.name(0)} has shape {self._stored_shape}, not (channels, height, width): "
                "write one latent per sample"
            )
        # shapes differ only if file sizes do: check one sample per distinct size
        for i in sorted(np.unique(self._index.size, return_index=True)[1].tolist()):
            shape = self._read(i).shape
            if shape != self._stored_shape:
                raise self._shape_error(i, shape)

    def _shape_error(self, i: int, shape: tuple[int, ...]) -> DataError:
        return DataError(
            f"sample {self._index.name(i)} has shape {shape}, the first sample has {self._stored_shape}: "
            "keep latents of different sizes in different folders"
        )

    def _read(self, i: int) -> np.ndarray:
        """The stored array; only its dtype is checked."""
        file = self._file(int(self._index.shard[i]))
        file.seek(int(self._index.offset[i]))
        try:
            latent = self._parse(file.read(int(self._index.size[i])))
        except Exception as error:  # numpy passes a damaged header to Python's tokenizer
            raise DataError(
                f"latent.npy of sample {self._index.name(i)} is not a readable array ({error}): write the shard again"
            ) from error
        if latent.dtype.kind != "f":
            raise DataError(f"latent.npy of sample {self._index.name(i)} is {latent.dtype}: store float16 or float32")
        return latent

    def _parse(self, raw: bytes) -> np.ndarray:
        """The array of an .npy file. Headers are cached: parsing one takes longer than reading a latent."""
        end = 10 + int.from_bytes(raw[8:10], "little")  # header length of version 1, the only one cached
        dtype, shape, size = self._headers.get(raw[:end], (None, (), -1))
        if len(raw) == size:
            return np.frombuffer(raw, dtype, offset=end).reshape(shape)
        # not np.load, which would open an .npz too
        array = np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False)
        # of a later version, whose prefix is longer, the size does not fit
        fits = array.flags.c_contiguous and len(raw) == end + array.nbytes
        if fits and len(self._headers) < _HEADERS:
            self._headers[raw[:end]] = array.dtype, array.shape, len(raw)
        return array

    def _file(self, shard: int) -> BinaryIO:
        if self._pid != os.getpid():  # forked: an inherited file shares its offset with the parent
            self._files, self._pid = OrderedDict(), os.getpid()
        if shard in self._files:
            self._files.move_to_end(shard)
            return self._files[shard]
        if len(self._files) >= _OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        for other, file in [*self._files.items()]:  # an evicted shard takes up space until it is closed
            if os.fstat(file.fileno()).st_nlink == 0:
                self._files.pop(other).close()
        self._files[shard] = open_shard(self._index.shards[shard])
        return self._files[shard]


def decide_kind(kind: Kind, vae: str, channels: int) -> StoredKind:
    """Whether `channels` stored channels are a sampled latent (the VAE's C) or moments (2C).

    >>> decide_kind("auto", "sd", 8)
    'moments'
    """
    check_choice(kind, "data.kind", get_args(Kind))
    expected = VAES[vae].channels
    if expected is None:
        if kind == "auto":
            raise ConfigError(
                "data.kind=auto needs a VAE to compare with and data.vae is none: set data.kind to sample, "
                f"or to moments if the {channels} stored channels are mean and logvar"
            )
        if kind == "moments" and channels % 2:
            raise ConfigError(f"data.kind is moments, but {channels} stored channels are not mean and logvar")
        return kind
    kinds: dict[int, StoredKind] = {expected: "sample", 2 * expected: "moments"}
    if channels not in kinds or kind not in ("auto", kinds[channels]):
        wanted = {"sample": f"{expected}", "moments": f"{2 * expected}", "auto": f"{expected} or {2 * expected}"}
        raise ConfigError(
            f"the latents have {channels} channels, data.vae={vae} with data.kind={kind} means {wanted[kind]}: "
            "change data.vae or data.kind"
        )
    return kinds[channels]


def sample_moments(moments: Tensor, seed: int, word: int, positions: Tensor) -> Tensor:
    """mean + std * noise from (B, 2C, H, W) mean and logvar; the noise of sample b is a hash of positions[b]."""
    mean, logvar = moments.chunk(2, dim=1)  # (B, C, H, W) each
    element = torch.arange(mean[0].numel(), device=mean.device)
    eps = noise.normal(seed, word, positions.to(mean.device)[:, None], element).view_as(mean)  # (B, C, H, W)
    return mean + torch.exp(0.5 * logvar.clamp(-30.0, 20.0)) * eps


def _fetch_all(shards: Sequence[RemoteShard]) -> None:
    with suppress(DataError, OSError):
        for shard in shards:
            shard.open().close()


def _check_cache(index: ShardIndex, window: int | None, cache_gb: float) -> None:
    """Refuse a cache too small for the shards shuffled together: it would thrash, refetching shards per sample."""
    sizes = sorted((shard.size for shard in index.shards if isinstance(shard, RemoteShard)), reverse=True)
    room = round(cache_gb * _GB)
    if sum(sizes) <= room:
        return
    fits = sum(np.cumsum(sizes) <= room) // 2
    if window is None:
        raise ConfigError(
            f"the shards have {sum(sizes) / _GB:.3g} GB and data.cache_gb is {cache_gb:g}: raise it, or set "
            f"data.window to at most {max(1, fits)}, so that as many shards are read at a time"
        )
    needed = sum(sizes[: 2 * window])
    if needed > room:
        raise ConfigError(
            f"data.window is {window} and data.cache_gb {cache_gb:g}: two windows have up to {needed / _GB:.3g} GB. "
            f"Raise data.cache_gb, or set data.window to at most {max(1, fits)}."
        )


def _check_labels(index: ShardIndex, num_classes: int) -> None:
    wrong = np.flatnonzero((index.label < 0) | (index.label >= num_classes))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"sample {index.name(first)} has label {index.label[first]}, outside 0..{num_classes - 1} "
            f"({counted(len(wrong), 'such sample')}, the largest label is {index.label.max()}): set data.num_classes "
            "or correct the labels"
        )
