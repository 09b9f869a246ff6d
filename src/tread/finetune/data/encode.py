"""Encode what the cache lacks of a fine-tune's images, masks and captions.

`tread encode`, which writes shards of latents for pretraining, is in `data/shards`.

- Each process encodes its share of every bucket and waits for the others.
- Encoders are functions that are called only if an item is missing, so they may load a model at the first call.
- A batch that does not fit into memory is halved, and so are those after it.
- A file that cannot be decoded is skipped and listed; the others are encoded.
- A reference image is encoded like any picture; a pair of one aspect ratio shares one crop, so that it stays aligned.
- Latents are stored in float16, whose rounding is far below the autoencoder's own error; text in its own dtype.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from tread.data.ahead import read_ahead
from tread.data.captioned.buckets import Bucket, Crop, bucket_of, crop_of, enlargement
from tread.data.captioned.entries import DataConfig
from tread.data.captioned.finding import Skipped
from tread.data.captioned.masks import latent_weight, read_mask
from tread.data.captioned.pixels import read_pixels
from tread.data.captioned.samples import Sample
from tread.data.captioned.tables import Place
from tread.errors import ConfigError, DataError
from tread.finetune.data.cache import FORMAT, Cache, Entry, ItemKind, Tensors, Texts
from tread.finetune.data.hashes import digest
from tread.words import counted

EncodePixels = Callable[[Tensor], Tensors]
"""(B, 3, F, H, W) in [-1, 1] -> tensors with a batch axis."""
EncodeText = Callable[[Sequence[str]], list[Tensors]]
"""Captions -> the embeddings of each, without a batch axis."""

_WRITERS = 8
"""Threads that write items, or read masks."""


@dataclass(frozen=True)
class _Picture:
    """An image or video to encode, cropped, and the key of its item."""

    key: str
    place: Place
    crop: Crop


def encode_samples(
    cache: Cache,
    samples: Sequence[Sample],
    configs: Sequence[DataConfig],
    *,
    encode: EncodePixels,
    identity: str,
    multiple: int,
    frame_factor: int = 1,
    batch_size: int = 1,
    say: Callable[[str], None] = print,
    progress: bool = True,
) -> tuple[list[Entry], list[Skipped]]:
    """Encode the samples that the cache lacks; returns the entries in order, and the samples skipped with the reason.

    `identity` names the encoder (`hashes.identity`); `multiple` and `frame_factor` are those of the family. All
    processes call it together with the same samples and get the same result.
    """
    places = [place for s in samples for place in (s.place, s.mask, s.reference) if place is not None]
    contents = cache.hashes.of(places, progress=progress and cache.is_main)
    entries: list[Entry | Skipped] = []
    pictures: dict[str, _Picture] = {}
    masks: dict[str, tuple[Entry, _Picture]] = {}
    enlarged: list[tuple[Sample, Bucket]] = []
    for sample in samples:
        unread = next((p for p in (sample.place, sample.mask, sample.reference) if p and p not in contents), None)
        if unread is not None:
            entries.append(Skipped(str(sample.place), f"{unread} cannot be read"))
            continue
        entry, picture, reference = _plan(sample, configs[sample.dataset], contents, identity, multiple, frame_factor)
        entries.append(entry)
        pictures[picture.key] = picture
        if reference is not None:
            pictures[reference.key] = reference
        if entry.weight is not None:
            masks[entry.weight] = entry, picture
        if enlargement(sample.size, entry.bucket) > 1:
            enlarged.append((sample, entry.bucket))
    if enlarged:
        (width, height), bucket = enlarged[0][0].size, enlarged[0][1]
        say(
            f"{len(enlarged)} of {len(samples)} samples are smaller than their bucket and are enlarged (the first is "
            f"{enlarged[0][0].place}, {width}x{height} to {bucket}); lower resolution, or set minimum_image_size to "
            "skip them"
        )
    _encode_pictures(cache, list(pictures.values()), encode, batch_size, progress and cache.is_main)
    cache.ranks.wait_for_everyone()
    _weigh(cache, list(masks.values()), progress and cache.is_main)
    cache.ranks.wait_for_everyone()
    return _present(cache, entries)


def _plan(
    sample: Sample, config: DataConfig, contents: dict[Place, str], identity: str, multiple: int, frame_factor: int
) -> tuple[Entry, _Picture, _Picture | None]:
    """The entry of a sample, with the pictures to encode for it: its own and its reference."""

    def picture(place: Place, crop: Crop) -> _Picture:
        return _Picture(digest(FORMAT, contents[place], crop, identity), place, crop)

    bucket = bucket_of(sample.size, config, multiple, frames=sample.frames, frame_factor=frame_factor)
    crop = crop_of(sample.size, bucket, config, contents[sample.place])
    image = picture(sample.place, crop)
    reference = None
    if sample.reference is not None and sample.reference_size is not None:
        (width, height), (own_width, own_height) = sample.size, sample.reference_size
        still = Bucket(bucket.width, bucket.height)
        if width * own_height == height * own_width:  # equal aspect ratios: one crop keeps the pair aligned
            reference_crop = Crop(still, crop.left, crop.top, crop.right, crop.bottom)
        else:
            still = bucket_of(sample.reference_size, config, multiple)
            reference_crop = crop_of(sample.reference_size, still, config, contents[sample.reference])
        reference = picture(sample.reference, reference_crop)
    entry = Entry(
        sample=sample,
        bucket=bucket,
        latents=image.key,
        weight=None if sample.mask is None else digest(FORMAT, contents[sample.mask], sample.mask_kind, image.key),
        reference=None if reference is None else reference.key,
        reference_bucket=None if reference is None else reference.crop.bucket,
    )
    return entry, image, reference


def _encode_pictures(
    cache: Cache, pictures: list[_Picture], encode: EncodePixels, batch_size: int, progress: bool
) -> None:
    """Encode this process's share of the missing latents, bucket by bucket."""
    buckets: dict[Bucket, list[_Picture]] = {}
    for picture in pictures:
        buckets.setdefault(picture.crop.bucket, []).append(picture)
    rank, world = cache.ranks.process_index, cache.ranks.num_processes
    shares = {bucket: members[rank::world] for bucket, members in sorted(buckets.items())}
    todo = {bucket: [p for p in share if not cache.has("latents", p.key)] for bucket, share in shares.items()}
    total, missing = (sum(len(members) for members in by.values()) for by in (shares, todo))

    def encode_all(pixels: Tensor) -> list[Tensors]:
        encoded = encode(pixels)
        return [{name: tensor[i] for name, tensor in encoded.items()} for i in range(len(pixels))]

    bar = tqdm(total=total, initial=total - missing, desc="latents", unit="sample", disable=not progress)
    with bar, _Writer(cache) as writer, ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for bucket, members in todo.items():
            limit = batch_size
            for batch, pixels in read_ahead(pool, _read, members, batch_size):
                good = {p: x for p, x in zip(batch, pixels, strict=True) if isinstance(x, Tensor)}
                for picture, failure in zip(batch, pixels, strict=True):
                    if isinstance(failure, DataError):
                        cache.skip("latents", picture.key, str(failure))
                if good:
                    x = torch.stack(list(good.values())).permute(0, 4, 1, 2, 3)  # (B, 3, F, H, W)
                    what = f"the autoencoder at {bucket}: lower resolution or video.num_frames, or set vae_dtype bf16"
                    rows, limit = _in_parts(encode_all, x.float() / 127.5 - 1, limit, what)
                    for picture, row in zip(good, rows, strict=True):
                        _store_latents(cache, writer, picture, row)
                bar.update(len(batch))


def _store_latents(cache: Cache, writer: "_Writer", picture: _Picture, row: Tensors) -> None:
    halved = {name: tensor.half() if tensor.dtype == torch.float32 else tensor for name, tensor in row.items()}
    if all(bool(torch.isfinite(tensor).all()) for tensor in halved.values()):
        writer.write("latents", picture.key, halved)
    else:
        cache.skip("latents", picture.key, "the autoencoder gives NaN or infinite latents: set vae_dtype to fp32")


class _Writer:
    """Writes items in threads: writing file by file can take longer than encoding."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self._pool = cache, ThreadPoolExecutor(_WRITERS)
        self._pending: deque[Future[None]] = deque()

    def write(self, kind: ItemKind, key: str, tensors: Tensors) -> None:
        """Queue an item for writing; an error is raised by a later call or on exit."""
        here = {name: tensor.cpu() for name, tensor in tensors.items()}
        self._pending.append(self._pool.submit(self.cache.write, kind, key, here))
        if len(self._pending) > 4 * _WRITERS:
            self._pending.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for future in self._pending:
            future.result()


def _read(picture: _Picture) -> Tensor | DataError:
    try:
        return read_pixels(picture.place, picture.crop)
    except DataError as error:
        return error


def _in_parts(encode: Callable[[Any], list[Tensors]], items: Any, limit: int, what: str) -> tuple[list[Tensors], int]:
    """Encode `limit` items at a time, fewer if memory runs out; returns the rows and the new limit."""
    rows: list[Tensors] = []
    while len(rows) < len(items):
        part: list[Tensors] | None = None
        try:
            with torch.no_grad():
                part = encode(items[len(rows) : len(rows) + limit])
        except torch.OutOfMemoryError as error:
            if limit == 1:
                raise ConfigError(f"not enough memory for {what}.") from error
        if part is None:  # outside the handler: the exception keeps tensors of the failed call alive
            limit //= 2
            torch.cuda.empty_cache()
            continue
        rows += part
    return rows, limit


def _weigh(cache: Cache, masks: list[tuple[Entry, _Picture]], progress: bool) -> None:
    """Write this process's share of the missing loss weights, at the resolution of the latents."""

    def weigh(item: tuple[Entry, _Picture]) -> None:
        entry, picture = item
        mask, key = entry.sample.mask, entry.weight
        if mask is None or key is None or cache.has("weights", key) or not cache.has("latents", entry.latents):
            return
        try:
            pixels = read_mask(mask, picture.crop, entry.sample.mask_kind)  # (H, W)
        except DataError as error:
            cache.skip("weights", key, str(error))
            return
        if not pixels.any():
            cache.skip("weights", key, f"its mask {mask} is black everywhere in the crop")
            return
        with safe_open(cache.path("latents", entry.latents), "pt") as file:
            rows = file.get_slice("mean").get_shape()[-2]
        cache.write("weights", key, {"weight": latent_weight(pixels, entry.bucket.height // rows)})

    share = masks[cache.ranks.process_index :: cache.ranks.num_processes]
    with ThreadPoolExecutor(_WRITERS) as pool:
        for _ in tqdm(pool.map(weigh, share), total=len(share), desc="masks", disable=not progress or not share):
            pass


def _present(cache: Cache, entries: Sequence[Entry | Skipped]) -> tuple[list[Entry], list[Skipped]]:
    """The entries whose items are all in the cache, and the others as skipped; the same in every process."""
    present: list[Entry] = []
    skipped: list[Skipped] = []
    for entry in entries:
        if isinstance(entry, Skipped):
            skipped.append(entry)
            continue
        items: list[tuple[ItemKind, str | None]] = [("latents", entry.latents), ("latents", entry.reference)]
        lacking = [
            (k, key) for k, key in [*items, ("weights", entry.weight)] if key and not cache.path(k, key).exists()
        ]
        if lacking:
            skipped.append(Skipped(str(entry.sample.place), cache.why_not(*lacking[0])))
        else:
            present.append(entry)
    if not present and skipped:
        name, reason = skipped[0]
        raise DataError(f"none of {counted(len(skipped), 'sample')} could be encoded; the first, {name}: {reason}")
    return present, skipped


def encode_texts(
    cache: Cache,
    captions: Sequence[str],
    *,
    encode: EncodeText,
    identity: str,
    batch_size: int = 1,
    progress: bool = True,
) -> Texts:
    """Encode the captions that the cache lacks, each once; `captions` includes the empty one and preview prompts."""
    texts = Texts(cache, identity)
    # longest first, so that running out of memory shows at once, and batches of similar length need little padding
    unique = sorted(dict.fromkeys(captions), key=lambda caption: (-len(caption), caption))
    share = unique[cache.ranks.process_index :: cache.ranks.num_processes]
    todo = [caption for caption in share if not cache.has("text", texts.key(caption))]
    limit = batch_size
    done, show = len(share) - len(todo), progress and cache.is_main
    bar = tqdm(total=len(share), initial=done, desc="text", unit="caption", disable=not show)
    with bar, _Writer(cache) as writer:
        for first in range(0, len(todo), batch_size):
            batch = todo[first : first + batch_size]
            what = "the text encoder: use a GPU with more memory, or encode on the CPU"
            rows, limit = _in_parts(encode, batch, limit, what)
            for caption, row in zip(batch, rows, strict=True):
                wrong = [name for name, tensor in row.items() if not torch.isfinite(tensor).all()]
                if wrong:
                    raise DataError(
                        f"the text encoder gives NaN or infinite {wrong[0]} for the caption {caption!r}: "
                        "set mixed_precision to 'no'"
                    )
                writer.write("text", texts.key(caption), row)
            bar.update(len(batch))
    cache.ranks.wait_for_everyone()
    return texts
