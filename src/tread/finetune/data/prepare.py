"""`prepare`: collect the samples of a config's data and encode them into the cache, one encoder in memory at a time.

- An encoder is loaded only if an item is missing, and freed before the next stage; a second run loads none. The files
  of all encoders are checked before the first one runs.
- The validation loss uses entries of dataset_type eval; without any, evenly spaced training samples.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache as once
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from tread.data.captioned.buckets import Bucket, Crop, Size, bucket_of
from tread.data.captioned.entries import DataConfig
from tread.data.captioned.finding import Skipped
from tread.data.captioned.masks import looks_like_text, read_mask
from tread.data.captioned.samples import Sample, collect, tell_skipped
from tread.data.captioned.sounds import clip_rate, has_sound
from tread.data.readable import SKIPPED_FILE
from tread.errors import ConfigError, DataError
from tread.finetune.data.cache import Cache, CachedSamples, Entry, Tensors, Texts
from tread.finetune.data.encode import encode_samples, encode_seen_texts, encode_texts
from tread.finetune.data.encoder import Encoder
from tread.finetune.data.hashes import identity
from tread.finetune.data.items import Items, Shapes, items_of, whole
from tread.finetune.data.long_texts import LongTexts, told
from tread.finetune.family import Text, TuneFamily
from tread.finetune.settings import FinetuneConfig
from tread.together import gathered
from tread.training.fingerprint import KINDS, check_shared, fingerprint
from tread.words import counted

LOOKED_AT = 64
"""Masks of a data entry that are tested for text."""
DRIFT = 5e-3
"""The largest relative difference of frame rates, such as 24 from 23.976, that keeps sound with its picture."""
T = TypeVar("T")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The encoded data of a run: training samples, validation samples and texts."""

    train: CachedSamples
    held_out: CachedSamples
    texts: Texts
    samples: Sequence[Sample]
    """All encoded samples, including those of eval entries that validation does not use."""
    previews_see: tuple[str, ...] = ()
    """Keys of the validation images, if the text encoder sees them beside the prompts."""

    @property
    def bucket(self) -> Bucket:
        """The most frequent bucket of the training samples."""
        counts = Counter(entry.bucket for entry in self.train.entries)
        return max(sorted(counts), key=lambda bucket: counts[bucket])

    def fingerprints(self) -> dict[str, Any]:
        """Those of the samples that could be encoded, for a checkpoint."""
        return fingerprints(self.samples)


def fingerprints(samples: Sequence[Sample]) -> dict[str, Any]:
    """Fingerprints of samples: training files, eval files, and the captions of both."""
    kinds: dict[str, dict[str, list[str]]] = {kind: {} for kind in KINDS}
    for sample in samples:
        media = sample.media.name if isinstance(sample.media, Path) else sample.media
        kind, entry = "held_out" if sample.held_out else "contents", f"data[{sample.dataset}]"
        kinds[kind].setdefault(entry, []).append(f"{media} {sample.size} {sample.frames}")
        kinds["captions"].setdefault(entry, []).extend(f"{media} {caption}" for caption in sample.captions)
    return {kind: fingerprint(groups) for kind, groups in kinds.items()}


def prepare(
    config: FinetuneConfig, family: TuneFamily, accelerator: Accelerator, folder: Path, *, batches: int | None = None
) -> Prepared:
    """Collect and encode the data of a config; all processes call it together.

    With `batches`, only the samples of that many batches are encoded, from the most frequent bucket.
    """
    say, show = accelerator.print, accelerator.is_main_process
    configs = config.entries()
    collected = collect(configs, video=family.video, say=say, progress=show)
    for check in data_checks(family, collected.samples, configs):
        check()
    samples = collected.samples
    check_shared(fingerprints(samples))
    if batches is not None:
        samples = _batch_of(samples, configs, family)[: batches * config.train_batch_size * accelerator.num_processes]
    cache = Cache(config.cache_dir, accelerator)

    if family.layered:
        counts = Counter(len(sample.references) for sample in samples)
        family.layers = max(counts, key=lambda count: counts[count])
    encoding = (config.vae_dtype, config.vae_enable_tiling, *family.encoding)
    named = identity(family.source, family.pixel_parts, *encoding)
    options: dict[str, Any] = {"shapes": _shapes_of(family), "seen": family.sees, "progress": show}
    # lazy: it hashes all files, so the first stage that needs the items computes them
    items = once(lambda: items_of(cache, samples, configs, identity=named, **options))
    texts, previews_see = _encode_texts(config, family, accelerator, cache, samples, items)
    entries, skipped = _encode_pictures(config, family, accelerator, cache, items())
    if show:
        tell_skipped([*collected.skipped, *skipped], folder / SKIPPED_FILE, say)
    return _split(cache, entries, texts, config.num_eval_images, previews_see)


def _shapes_of(family: TuneFamily) -> Shapes:
    """The image, clip and sound sizes of a family."""
    return Shapes(
        multiple=family.multiple,
        frame_factor=family.frame_factor,
        references=family.reference_shape,
        fills=family.reference_fills,
        sound=None if family.sound_rate is None else (family.frame_rate, family.sound_rate),
        alpha=family.alpha,
    )


def _encode_texts(
    config: FinetuneConfig,
    family: TuneFamily,
    accelerator: Accelerator,
    cache: Cache,
    samples: Sequence[Sample],
    items: Callable[[], Items],
) -> tuple[Texts, tuple[str, ...]]:
    """Encode captions and prompts; returns them, and the keys of the validation images that the text encoder sees."""
    say, show = accelerator.print, accelerator.is_main_process
    dtype = torch.bfloat16 if config.mixed_precision == "bf16" else torch.float32
    parts = (*family.text_parts, *family.needed_parts)
    encoder = Encoder(
        lambda: family.source.pipeline(*parts, dtype=dtype, given=family.stand_ins()),
        lambda: family.source.check(*family.text_parts, *family.pixel_parts),
        accelerator.device,
        say,
    )
    named = identity(family.source, family.text_parts, dtype, family.text_length, *family.text_encoding)
    prompts = [*config.prompts, config.validation_negative_prompt]
    if family.sees is not None:
        seen = whole(cache, config.validation_images)
        texts = encode_seen_texts(
            cache,
            [*items().seen_captions(), *((prompt, seen) for prompt in prompts if config.prompts)],
            encode=lambda caption, images: family.encode_seen(encoder.pipeline, caption, images),
            identity=named,
            progress=show,
        )
        encoder.free()
        return texts, tuple(picture.key for picture in seen)
    long = LongTexts(None if family.whole_texts else family.text_length)

    def encode(batch: Sequence[str]) -> list[Text]:
        rows = family.encode_text(encoder.pipeline, batch)
        long.add(encoder.pipeline, batch)  # not before: too large a batch is tried again in parts
        return rows

    texts = encode_texts(
        cache,
        [*(caption for sample in samples for caption in sample.captions), "", *prompts],
        encode=encode,
        identity=named,
        batch_size=config.text_encoder_batch_size,
        progress=show,
    )
    if found := [text for texts in gathered(long.found) for text in texts]:
        say(told(found, long.length))
    encoder.free()
    return texts, ()


def _encode_pictures(
    config: FinetuneConfig, family: TuneFamily, accelerator: Accelerator, cache: Cache, items: Items
) -> tuple[list[Entry], list[Skipped]]:
    """Encode images, clips, their sound and masks; returns the entries, and the samples skipped with the reason."""
    say, device = accelerator.print, accelerator.device
    encoder = Encoder(
        lambda: _autoencoder(config, family), lambda: family.source.check(*family.pixel_parts), device, say
    )

    def encode(pixels: Tensor, *sound: Tensor) -> Tensors:
        encoded = family.encode_pixels(encoder.pipeline, pixels.to(device))
        for waveform in sound:
            encoded |= family.encode_sound(encoder.pipeline, waveform.to(device))
        return encoded

    entries, skipped = encode_samples(
        cache,
        items,
        encode=encode,
        batch_size=config.vae_batch_size,
        say=say,
        progress=accelerator.is_main_process,
    )
    encoder.free()
    return entries, skipped


def _batch_of(samples: Sequence[Sample], configs: Sequence[DataConfig], family: TuneFamily) -> list[Sample]:
    """The samples to train on that share the most frequent bucket."""

    def group(sample: Sample) -> tuple[bool, Bucket, tuple[Size, ...]]:
        return sample.held_out or not sample.repeats, _bucket(sample, configs, family), sample.reference_sizes

    groups = Counter(map(group, samples))
    chosen = max(groups, key=lambda one: (not one[0], groups[one]))
    return [sample for sample in samples if group(sample) == chosen]


def _bucket(sample: Sample, configs: Sequence[DataConfig], family: TuneFamily) -> Bucket:
    multiple, factor = family.multiple, family.frame_factor
    return bucket_of(sample.size, configs[sample.dataset], multiple, frames=sample.frames, frame_factor=factor)


def _split(cache: Cache, entries: Sequence[Entry], texts: Texts, count: int, seen: tuple[str, ...]) -> Prepared:
    train = [entry for entry in entries if not entry.sample.held_out]
    held_out = [entry for entry in entries if entry.sample.held_out] or train
    if not train:
        raise DataError(f"no sample to train on could be encoded; {SKIPPED_FILE} in the run's folder lists the reasons")
    return Prepared(
        train=CachedSamples(cache, train, texts),
        held_out=CachedSamples(cache, _evenly(held_out, count), texts),
        texts=texts,
        previews_see=seen,
        samples=[entry.sample for entry in entries],
    )


def _evenly(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly spaced."""
    indices = torch.linspace(0, len(items) - 1, min(most, len(items))).round().int().tolist()
    return [items[i] for i in indices]


def data_checks(
    family: TuneFamily | None, samples: Sequence[Sample], configs: Sequence[DataConfig]
) -> list[Callable[[], None]]:
    """The checks of samples by which a run refuses its data; without a family, those that need none."""
    checks = [lambda: check_trained(samples), lambda: check_flips(samples, configs)]
    if family is None:
        return checks
    return [
        *checks,
        lambda: check_references(family, samples),
        lambda: check_sizes(family, samples, configs),
        lambda: check_sound(family, samples, configs),
    ]


def check_trained(samples: Sequence[Sample]) -> None:
    """Refuse data of eval entries alone."""
    if all(sample.held_out for sample in samples):
        raise ConfigError("data has only entries of dataset_type eval; add one to train on.")


def check_references(family: TuneFamily, samples: Sequence[Sample]) -> None:
    """Refuse references that a model cannot take, and samples without one that it needs."""
    allowed, name = family.reference_counts, family.source.pipeline_name
    count = sum(bool(sample.references) for sample in samples)
    if count and not family.takes_references:
        raise ConfigError(
            f"{counted(count, 'sample')} with a reference image, but a {name} takes none: set "
            "pretrained_model_name_or_path to a model that edits images (FLUX.2, FLUX Kontext, Qwen-Image-Edit), or "
            "remove the references from data."
        )
    if family.layered and count < len(samples):
        raise ConfigError(
            f"a {name} trains on images with their layers, but {len(samples) - count} of {len(samples)} samples have "
            "no layers: give the folders of the layers as conditioning_data_dir with conditioning_type 'reference' in "
            "data (docs/data.md)."
        )
    if family.needs_references and count < len(samples):
        raise ConfigError(
            f"a {name} trains on pairs, but {len(samples) - count} of {len(samples)} samples have no reference "
            "image: give conditioning_data_dir with conditioning_type 'reference' in data (docs/data.md)."
        )
    wrong = [sample for sample in samples if len(sample.references) not in allowed]
    if wrong:
        raise ConfigError(
            f"{wrong[0].media} has {counted(len(wrong[0].references), 'reference image')}, but a {name} takes at most "
            f"{allowed.stop - 1}: remove the others from data."
        )


def check_sizes(family: TuneFamily, samples: Sequence[Sample], configs: Sequence[DataConfig]) -> None:
    """Refuse samples of a size or a number of frames that a model cannot be trained on."""
    unfit: list[tuple[Sample, str]] = []
    for sample in samples:
        bucket = _bucket(sample, configs, family)
        if (reason := family.unfit(bucket.width, bucket.height, bucket.frames)) is not None:
            unfit.append((sample, reason))
    if unfit:
        (first, reason), name = unfit[0], family.source.pipeline_name
        raise ConfigError(
            f"{len(unfit)} of {len(samples)} samples, the first {first.media}, cannot train a {name}: {reason}."
        )


def check_sound(family: TuneFamily, samples: Sequence[Sample], configs: Sequence[DataConfig]) -> None:
    """Refuse samples without sound, and clips whose sound would drift from the picture, if sound is trained."""
    if family.sound_rate is None:
        return
    mute = [sample for sample in samples if not has_sound(sample.media)]
    if mute:
        raise ConfigError(
            f"sound is 'train', but {len(mute)} of {len(samples)} samples, the first {mute[0].media}, have no sound: "
            "leave them out of data, or set sound to 'keep'."
        )
    for sample in samples:
        rate = configs[sample.dataset].video.frame_rate or clip_rate(Path(str(sample.media)))
        if not math.isclose(rate, family.frame_rate, rel_tol=DRIFT):
            raise ConfigError(
                f"{sample.media} is read at {rate:g} frames per second, but framerate is {family.frame_rate:g}, so "
                f"sound and picture would drift apart: set video.frame_rate in data to {family.frame_rate:g}, or "
                f"framerate to {rate:g}."
            )


def check_flips(samples: Sequence[Sample], configs: Sequence[DataConfig]) -> None:
    """Refuse to mirror samples whose masks look like text; tests up to LOOKED_AT masks of each entry."""
    for index, config in enumerate(configs):
        if config.horizontal_flip is not True:
            continue
        masked = [sample for sample in samples if sample.dataset == index and sample.mask is not None]
        for sample in _evenly(masked, LOOKED_AT):
            mask, kind = sample.mask, sample.mask_kind
            try:
                weights = read_mask(mask, Crop(Bucket(256, 256), 0.0, 0.0, 1.0, 1.0), kind)  # pyright: ignore[reportArgumentType]
            except DataError:  # the sample is skipped, and listed, when it is encoded
                continue
            if looks_like_text(weights):
                raise ConfigError(
                    f"horizontal_flip of data entry {config.name!r} is true, but the mask {mask} looks like text, "
                    "which cannot be mirrored: set it to false, or to 'always' if the masks mark no text."
                )


def _autoencoder(config: FinetuneConfig, family: TuneFamily) -> Any:
    pipeline = family.source.pipeline(*family.pixel_parts, dtype=DTYPES[config.vae_dtype], given=family.stand_ins())
    if config.vae_enable_tiling:
        pipeline.vae.enable_tiling()
    return pipeline
