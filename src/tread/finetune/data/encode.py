"""Encode the images, masks and captions of a fine-tune that are missing from the cache.

`tread encode`, which writes shards of latents for pretraining, is in `data/shards`.

- Each process encodes its share of every bucket and waits for the others.
- Encoders are functions that are called only if an item is missing, so they may load a model at the first call.
- If a batch runs out of memory, the batch size is halved, also for the batches after it.
- A file that cannot be decoded is skipped and listed; the others are encoded.
- A reference image is encoded like any picture. If the text encoder sees it too, a caption is encoded once per
  sample, together with the sample's references.
- Latents are stored in float16, whose rounding is far below the autoencoder's own error; text in its own dtype.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import torch
from PIL.Image import Image
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from tread.data.ahead import read_ahead
from tread.data.captioned.buckets import Bucket, enlargement
from tread.data.captioned.finding import Skipped
from tread.data.captioned.masks import latent_weight, read_mask
from tread.data.captioned.pixels import read_pixels
from tread.data.captioned.sounds import read_sound
from tread.errors import ConfigError, DataError
from tread.finetune.data.cache import Cache, Entry, ItemKind, Tensors, Texts
from tread.finetune.data.items import Items, Picture, read_image
from tread.together import gathered
from tread.words import counted

EncodePixels = Callable[..., Tensors]
"""(B, 3 or 4, F, H, W) in [-1, 1] and, if it is trained, sound (B, 2, N) -> tensors with a batch axis."""
EncodeText = Callable[[Sequence[str]], list[Tensors]]
"""Captions -> the embeddings of each, without a batch axis."""
EncodeSeen = Callable[[str, Sequence[Image]], Tensors]
"""A caption and the images that the text encoder sees beside it -> its embeddings, without a batch axis."""

_TEXT_MEMORY = "the text encoder: use a GPU with more memory, or encode on the CPU"
_WRITERS = 8
"""Threads that write items, or read masks."""


def encode_samples(
    cache: Cache,
    items: Items,
    *,
    encode: EncodePixels,
    batch_size: int = 1,
    say: Callable[[str], None] = print,
    progress: bool = True,
) -> tuple[list[Entry], list[Skipped]]:
    """Encode the pictures that the cache lacks; returns the entries in order, and the samples skipped with the reason.

    All processes call it together with the same items and get the same result.
    """
    entries = items.readable
    enlarged = [entry for entry in entries if enlargement(entry.sample.size, entry.bucket) > 1]
    if enlarged:
        first = enlarged[0]
        width, height = first.sample.size
        say(
            f"{len(enlarged)} of {len(items.entries)} samples are smaller than their bucket and are enlarged (the "
            f"first is {first.sample.media}, {width}x{height} to {first.bucket}); lower resolution, or set "
            "minimum_image_size to skip them"
        )
    _encode_pictures(cache, list(items.pictures.values()), encode, batch_size, progress and cache.is_main)
    gathered(None)
    sides = [side for entry in entries for side in entry.sides]
    masked = {entry.weight: (entry, items.pictures[entry.latents]) for entry in sides if entry.weight is not None}
    _weigh(cache, list(masked.values()), progress and cache.is_main)
    gathered(None)
    return _present(cache, items.entries)


def _encode_pictures(
    cache: Cache, pictures: list[Picture], encode: EncodePixels, batch_size: int, progress: bool
) -> None:
    """Encode this process's share of the missing latents, bucket by bucket."""
    buckets: dict[Bucket, list[Picture]] = {}
    for picture in pictures:
        buckets.setdefault(picture.crop.bucket, []).append(picture)
    rank, world = cache.ranks.process_index, cache.ranks.num_processes
    shares = {bucket: members[rank::world] for bucket, members in sorted(buckets.items())}
    todo = {bucket: [p for p in share if not cache.has("latents", p.key)] for bucket, share in shares.items()}
    total, missing = (sum(len(members) for members in by.values()) for by in (shares, todo))

    def encode_all(rows: list[tuple[Tensor, ...]]) -> list[Tensors]:
        pixels, *sound = (torch.stack(column) for column in zip(*rows, strict=True))
        encoded = encode(pixels.permute(0, 4, 1, 2, 3).float() / 127.5 - 1, *sound)  # (B, 3, F, H, W)
        return [{name: tensor[i] for name, tensor in encoded.items()} for i in range(len(rows))]

    bar = tqdm(total=total, initial=total - missing, desc="latents", unit="sample", disable=not progress)
    with bar, _Writer(cache) as writer, ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for bucket, members in todo.items():
            limit = batch_size
            for batch, pixels in read_ahead(pool, _read, members, batch_size):
                good = {p: x for p, x in zip(batch, pixels, strict=True) if not isinstance(x, DataError)}
                for picture, failure in zip(batch, pixels, strict=True):
                    if isinstance(failure, DataError):
                        cache.skip("latents", picture.key, str(failure))
                if good:
                    what = f"the autoencoder at {bucket}: lower resolution or video.num_frames, or set vae_dtype bf16"
                    rows, limit = _in_parts(encode_all, list(good.values()), limit, what)
                    for picture, row in zip(good, rows, strict=True):
                        _store_latents(cache, writer, picture, row)
                bar.update(len(batch))


def _store_latents(cache: Cache, writer: "_Writer", picture: Picture, row: Tensors) -> None:
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
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        self._pending.append(self._pool.submit(self.cache.write, kind, key, on_host))
        if len(self._pending) > 4 * _WRITERS:
            self._pending.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for future in self._pending:
            future.result()


def _read(picture: Picture) -> tuple[Tensor, ...] | DataError:
    """Pixels (F, H, W, 3), or 4 with transparency, and the sound (2, N) if it is encoded too."""
    try:
        pixels = read_pixels(picture.media, picture.crop, alpha=picture.alpha)
        return (pixels,) if picture.sound is None else (pixels, read_sound(picture.media, *picture.sound))
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
        if part is None:  # outside the handler, where the exception would keep the failed call's tensors alive
            limit //= 2
            torch.cuda.empty_cache()
            continue
        rows += part
    return rows, limit


def _weigh(cache: Cache, masks: list[tuple[Entry, Picture]], progress: bool) -> None:
    """Compute this process's share of the missing loss weights from masks, at the resolution of the latents."""

    def weigh(item: tuple[Entry, Picture]) -> None:
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
        needed: dict[str, ItemKind] = {}
        for side in entry.sides:
            needed |= dict.fromkeys((side.latents, *side.references), "latents")
            if side.weight is not None:
                needed[side.weight] = "weights"
        missing = next((key for key, kind in needed.items() if not cache.path(kind, key).exists()), None)
        if missing is not None:
            skipped.append(Skipped(str(entry.sample.media), cache.why_not(needed[missing], missing)))
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
    # longest first: out-of-memory shows at once, and batches of similar length need little padding
    unique = sorted(dict.fromkeys(captions), key=lambda caption: (-len(caption), caption))
    share = unique[cache.ranks.process_index :: cache.ranks.num_processes]
    todo = [caption for caption in share if not cache.has("text", texts.key(caption))]
    limit = batch_size
    done, show = len(share) - len(todo), progress and cache.is_main
    bar = tqdm(total=len(share), initial=done, desc="text", unit="caption", disable=not show)
    with bar, _Writer(cache) as writer:
        for first in range(0, len(todo), batch_size):
            batch = todo[first : first + batch_size]
            rows, limit = _in_parts(encode, batch, limit, _TEXT_MEMORY)
            for caption, row in zip(batch, rows, strict=True):
                _store_text(writer, texts.key(caption), caption, row)
            bar.update(len(batch))
    gathered(None)
    for key in map(texts.key, unique):
        if not cache.path("text", key).exists():
            cache.why_not("text", key)
    return texts


def encode_seen_texts(
    cache: Cache,
    captions: Sequence[tuple[str, Sequence[Picture]]],
    *,
    encode: EncodeSeen,
    identity: str,
    progress: bool = True,
) -> Texts:
    """Encode the captions that the cache lacks, each with the pictures that the text encoder sees beside it."""
    texts = Texts(cache, identity)
    wanted = {texts.key(caption, [p.key for p in seen]): (caption, seen) for caption, seen in captions}
    share = list(wanted.items())[cache.ranks.process_index :: cache.ranks.num_processes]
    todo = [(key, *item) for key, item in share if not cache.has("text", key)]
    done, show = len(share) - len(todo), progress and cache.is_main
    bar = tqdm(total=len(share), initial=done, desc="text", unit="caption", disable=not show)
    with bar, _Writer(cache) as writer:
        for key, caption, seen in todo:
            bar.update()
            try:
                images = [read_image(picture) for picture in seen]
            except DataError:  # its latents cannot be encoded either, and `_present` reports the sample
                continue
            (row,), _ = _in_parts(lambda one: [encode(*one[0])], [(caption, images)], 1, _TEXT_MEMORY)
            _store_text(writer, key, caption, row)
    gathered(None)
    return texts


def _store_text(writer: "_Writer", key: str, caption: str, row: Tensors) -> None:
    wrong = [name for name, tensor in row.items() if not torch.isfinite(tensor).all()]
    if wrong:
        raise DataError(
            f"the text encoder gives NaN or infinite {wrong[0]} for the caption {caption!r}: set mixed_precision to "
            "'no'"
        )
    writer.write("text", key, row)
