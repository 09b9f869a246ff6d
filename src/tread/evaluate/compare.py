"""Comparison of two sets of images, for `tread eval` and the trainer.

- `measure` computes the statistics of one set, `compare` the metrics of two, `evaluate` does both for two paths.
- Processes take contiguous parts of a set and join their tallies in order: metrics do not depend on their number.
- With a work folder a pass is saved as it runs: an interrupted one resumes, and a reference is measured once.
- A metric that cannot be computed is omitted with a note; a biased one comes with a warning.
"""

import hashlib
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from tread.data.ahead import read_ahead
from tread.errors import ConfigError, RiskWarning, check_int
from tread.evaluate.features import INCEPTION, Extractor, distance_name
from tread.evaluate.frechet import frechet_distance
from tread.evaluate.images import ImageSource, MixedSizes, has_images, open_images, write_batch
from tread.evaluate.metrics import kernel_distance, precision_recall
from tread.evaluate.statistics import Statistics, Tally, read_statistics
from tread.files import atomic_write, writing
from tread.together import gathered
from tread.words import counted

USUAL_COUNT = 10_000
SAVE_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class Report:
    """The metrics of one comparison."""

    features: str
    samples: int | None
    reference: int | None
    metrics: dict[str, float]
    notes: list[str] = field(default_factory=list)
    """Reasons why a metric is missing or biased."""

    def table(self) -> str:
        """The metrics as a text table of two columns."""
        counts = {"samples": self.samples, "reference": self.reference}
        rows = [(name, "unknown" if count is None else f"{count:,}") for name, count in counts.items()]
        rows += [("features", self.features), *((name, f"{value:.5g}") for name, value in self.metrics.items())]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value:>12}" for name, value in rows)


class Options(TypedDict, total=False):
    """The keyword arguments of `measure`."""

    batch_size: int
    keep_vectors: bool
    work: Path | None
    progress: bool


def measure(
    source: ImageSource,
    extractor: Extractor,
    label: str = "images",
    *,
    batch_size: int = 64,
    keep_vectors: bool = True,
    work: Path | None = None,
    progress: bool = True,
) -> Statistics:
    """Run the extractor over all images; every process of a group must call it and gets the same statistics."""
    check_int(batch_size, "--batch-size", 1)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    first, stop = (len(source) * part // world for part in (rank, rank + 1))
    tally = Tally(extractor.name, len(source), keep_vectors=keep_vectors)
    saved = whole = None
    if work is not None:
        words = f"{source.identity()} {extractor.fingerprint()} {keep_vectors}"
        stem = f"{extractor.name}-{hashlib.sha256(words.encode()).hexdigest()[:16]}"
        whole, saved = work / f"{stem}.npz", work / f"{stem}.part-{rank}-of-{world}.npz"
        with writing(work):
            work.mkdir(parents=True, exist_ok=True)
        if all(gathered(whole.exists())):
            _remove(saved)  # left over if an earlier run was killed before removing it
            return Tally.load(whole).statistics()
        if saved.exists():
            tally = Tally.load(saved)
    since = time.monotonic()
    hidden = not progress or rank > 0
    # leave=None removes a finished bar below another one, such as the trainer's
    with tqdm(total=stop - first, initial=tally.count, desc=label, unit="img", disable=hidden, leave=None) as bar:
        for index, images in _batches(source, first + tally.count, stop, batch_size):
            tally.add(extractor(images), index)
            bar.update(len(images))
            if saved is not None and time.monotonic() - since > SAVE_SECONDS:
                tally.save(saved)
                since = time.monotonic()
    if saved is not None:
        tally.save(saved)
    joined = _joined(tally)
    if whole is not None and saved is not None:
        if rank == 0:
            joined.save(whole)
        gathered(None)  # barrier: no part is removed before the merged tally is saved
        _remove(saved)
    return joined.statistics()


def _remove(part: Path) -> None:
    """Remove a partial tally that has been merged; a failure to remove it is harmless."""
    with suppress(OSError):
        part.unlink(missing_ok=True)


def _batches(source: ImageSource, first: int, stop: int, size: int) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Batches as (index of the first image, images), read one batch ahead."""

    def read(start: int) -> list[np.ndarray]:
        return source.read(start, min(start + size, stop))

    starts = range(first, stop, size)
    if not source.read_ahead:
        yield from ((start, read(start)) for start in starts)
        return
    with ThreadPoolExecutor(1) as pool:
        for (start,), (images,) in read_ahead(pool, read, starts, 1):
            yield start, images


def _joined(tally: Tally) -> Tally:
    """The tallies of all processes, in order."""
    parts = gathered(tally)
    if len(parts) == 1:
        return tally
    whole = Tally(tally.features, tally.total, keep_vectors=tally.keep_vectors)
    for part in parts:
        whole.merge(part)
    return whole


def statistics_at(
    path: Path, extractor: Extractor, label: str = "images", count: int | None = None, **options: Unpack[Options]
) -> Statistics:
    """`measure` for a path; statistics of this extractor that an `.npz` holds are used instead of its images.

    With `count` only the first images are measured, and stored statistics are ignored.
    """
    published = _published(path, extractor)
    if count is not None:
        if not has_images(path):
            raise ConfigError(f"{path} holds statistics and no images to count; leave --count out.")
        return measure(open_images(path, count), extractor, label, **options)
    if published is None:
        return measure(open_images(path), extractor, label, **options)
    if not has_images(path) or not options.get("keep_vectors", True):
        return published
    measured = measure(open_images(path), extractor, label, **options)
    # ADM's files hold statistics of the whole dataset but only some of its images, so `count` is the published one
    return replace(measured, count=published.count, pool=published.pool, spatial=published.spatial or measured.spatial)


def _published(path: Path, extractor: Extractor) -> Statistics | None:
    """Stored statistics of this extractor, or None; refused if there are only others and no images."""
    stored = read_statistics(path)
    if stored is not None and stored.features == extractor.name:
        return stored
    if not has_images(path):
        contents = "neither images nor mu and sigma" if stored is None else f"statistics of {stored.features}"
        raise ConfigError(f"{path} holds {contents}; with `features` of {extractor.name} give images.")
    return None


def compare(samples: Statistics, reference: Statistics, *, device: torch.device | str = "cpu") -> Report:
    """Every metric that can be computed from the two sides."""
    if samples.features != reference.features:
        raise ConfigError(
            f"the samples have features of {samples.features} and the reference of {reference.features}; "
            "take both with the same `features`."
        )
    fid = samples.features == INCEPTION
    suffix = "" if fid else f"-{samples.features}"
    metrics = {distance_name(samples.features): frechet_distance(*samples.pool, *reference.pool)}
    notes = _count_notes(samples, reference)
    if samples.spatial is not None and reference.spatial is not None:
        metrics["sFID" if fid else f"sFD{suffix}"] = frechet_distance(*samples.spatial, *reference.spatial)
    if samples.score is not None and fid:
        metrics["IS"], metrics["IS std"] = samples.score
    if samples.vectors is not None and reference.vectors is not None:
        a, b = (torch.from_numpy(side.vectors).to(device) for side in (samples, reference))
        metrics[f"precision{suffix}"], metrics[f"recall{suffix}"] = precision_recall(a, b)
        kernel = "KID" if fid else f"KD{suffix}"
        metrics[kernel], metrics[f"{kernel} std"] = kernel_distance(a, b)
    elif (samples.vectors is None) != (reference.vectors is None):  # if both are None, they were left out on purpose
        notes.append("precision, recall and the kernel distance were not taken: they need the images of both sides.")
    return Report(
        features=samples.features, samples=samples.count, reference=reference.count, metrics=metrics, notes=notes
    )


def _count_notes(samples: Statistics, reference: Statistics) -> list[str]:
    """Notes on the bias of Frechet distances with few images: Chong and Forsyth 2020 (arXiv 1911.07023)."""
    notes, width = [], samples.pool.mean.shape[0]
    for name, count in (("samples", samples.count), ("the reference", reference.count)):
        if count is None or count >= USUAL_COUNT:
            continue
        why = f"no more than the {width} features: its covariance is singular" if count <= width else "few"
        notes.append(
            f"{name}: {count:,} images are {why}. The Frechet distance falls as the count grows: compare it only with "
            f"figures from the same counts, and take {USUAL_COUNT:,} or more."
        )
    if samples.count is not None and reference.count is not None and samples.count != reference.count:
        notes.append(
            f"{samples.count:,} samples against {reference.count:,}: unequal counts shift the Frechet distance, "
            "precision and recall; compare only with figures from the same two counts."
        )
    return notes


def evaluate(
    samples: Path,
    reference: Path | None,
    extractor: Extractor,
    *,
    batch_size: int = 64,
    frechet_only: bool = False,
    count: int | None = None,
    work: Path | None = None,
    save: Path | None = None,
    progress: bool = True,
) -> Report | None:
    """`tread eval`: the report, or None without a reference, when the samples are only saved."""
    if save is not None and save.suffix != ".npz":
        raise ConfigError(f"--save is {str(save)!r}; the name must end with .npz.")
    if work is not None and work.exists() and not work.is_dir():
        raise ConfigError(f"--work is {str(work)!r}, which is a file; name a folder.")
    if save is not None and not has_images(samples):
        raise ConfigError(f"--save writes images, and {samples} holds none; give it to --ref as it is.")
    for path in (samples, reference):  # both are checked before the first image is measured
        if path is not None:
            _check(path, extractor)
    if save is not None:
        with writing(save):
            save.parent.mkdir(parents=True, exist_ok=True)
    options = Options(batch_size=batch_size, keep_vectors=not frechet_only, work=work, progress=progress)
    ours = statistics_at(samples, extractor, "samples", count, **options)
    if save is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        save_reference(save, open_images(samples, count), ours)
    if reference is None:
        return None
    theirs = statistics_at(reference, extractor, "reference", **options)
    report = compare(ours, theirs, device=extractor.device)
    for note in report.notes:
        warnings.warn(note, RiskWarning, stacklevel=2)
    return report


def _check(path: Path, extractor: Extractor) -> None:
    """Refuse a path without at least 2 images or usable statistics."""
    _published(path, extractor)
    if has_images(path) and (count := len(open_images(path))) < 2:
        raise ConfigError(
            f"{path} has {counted(count, 'image')} and so no covariance; give at least 2, and thousands for a figure."
        )


def save_reference(path: Path, source: ImageSource, statistics: Statistics) -> None:
    """Write an ADM reference batch: images, mu, sigma, and the name of the features; without images of several sizes,
    with a warning."""
    arrays = {"mu": statistics.pool.mean, "sigma": statistics.pool.covariance}
    if statistics.spatial is not None:
        arrays |= {"mu_s": statistics.spatial.mean, "sigma_s": statistics.spatial.covariance}
    if statistics.count is not None:
        arrays["count"] = np.array(statistics.count)
    arrays["features"] = np.array(statistics.features)
    try:
        write_batch(path, source, arrays)
    except MixedSizes as error:
        with atomic_write(path) as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        warnings.warn(
            f"{error}: {path} has the statistics alone, which give the Frechet distances. Precision, recall and the "
            "kernel distance need images, resized to one size first.",
            RiskWarning,
            stacklevel=2,
        )
