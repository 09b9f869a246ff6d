"""Statistics of a set of images: float64 moments of its features, the features, and sums for the Inception Score.

- A tally accumulates batches, merges with another process's, and is saved as one `.npz`.
- Published statistics are read from an `.npz` with `mu` and `sigma`, as ADM's evaluator writes it.
- Moments are a mean and the scatter around it, merged by Chan's formula: sums of squares would lose digits if features
  are far from zero.
- Covariances divide by N - 1, as FID's first implementation does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from tread.data.images import reading
from tread.errors import DataError
from tread.evaluate.activations import Activations
from tread.evaluate.features import INCEPTION
from tread.evaluate.images import arrays_of
from tread.evaluate.metrics import inception_score
from tread.files import atomic_write
from tread.words import counted

SPLIT = 5000  # images of one split of the Inception Score


class Gaussian(NamedTuple):
    mean: np.ndarray
    """(D,)"""
    covariance: np.ndarray
    """(D, D)"""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """One side of a comparison."""

    features: str
    """The extractor's name."""
    count: int | None
    """The number of images; None if a file of published statistics does not have it."""
    pool: Gaussian
    spatial: Gaussian | None = None
    vectors: np.ndarray | None = None
    """(N, D) float32: the features themselves, for precision, recall and the kernel distance."""
    score: tuple[float, float] | None = None
    """Inception Score, and its standard deviation over the splits."""


def read_statistics(path: Path) -> Statistics | None:
    """The statistics in an `.npz`; None if it has neither `mu` nor `sigma`, or is no `.npz`.

    A file that does not name its features has Inception's, as ADM's reference batches do.
    """
    arrays = arrays_of(path)
    pool = _read_gaussian(arrays, "mu", "sigma", path)
    if pool is None:
        return None
    return Statistics(
        features=str(arrays.get("features", INCEPTION)),
        count=_whole(arrays["count"], "count", path) if "count" in arrays else None,
        pool=pool,
        spatial=_read_gaussian(arrays, "mu_s", "sigma_s", path),
    )


def _read_gaussian(arrays: Mapping[str, np.ndarray], mean: str, covariance: str, path: Path) -> Gaussian | None:
    shapes = {name: arrays[name].shape for name in (mean, covariance) if name in arrays}
    if not shapes:
        return None
    if len(shapes) < 2 or len(shapes[mean]) != 1 or shapes[covariance] != shapes[mean] * 2:
        given = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"{path} has {given}; statistics are {mean} (D,) and {covariance} (D, D): write it again")
    if any(arrays[name].dtype.kind not in "fiu" for name in shapes):
        raise DataError(f"{path} has {mean} or {covariance} that are not real numbers: write it again")
    if not all(np.isfinite(arrays[name]).all() for name in shapes):
        raise DataError(f"{path} has numbers in {mean} or {covariance} that are not finite: write it again")
    return Gaussian(arrays[mean], arrays[covariance])


def _whole(array: np.ndarray, name: str, path: Path) -> int:
    """The non-negative integer in a one-element array."""
    if array.size != 1 or array.dtype.kind not in "iub" or array.item() < 0:
        raise DataError(f"{path} has {name} {array.dtype} {array.shape}; it must be one whole number: write it again")
    return int(array.item())


# Chan, Golub and LeVeque 1979 Eq. 2.1
class Moments:
    """Count, mean (D,) and scatter (D, D) of the rows added so far."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean = np.zeros(width)
        self.scatter = np.zeros((width, width))

    def add(self, rows: np.ndarray) -> None:
        """Add rows (B, D)."""
        rows = rows.astype(np.float64)
        part = Moments(rows.shape[1])
        part.count = rows.shape[0]
        part.mean = rows.mean(0)  # (D,)
        centred = rows - part.mean
        part.scatter = centred.T @ centred  # (D, D)
        self.merge(part)

    def merge(self, other: "Moments") -> None:
        count = self.count + other.count
        gap = other.mean - self.mean  # (D,)
        self.scatter += other.scatter + np.outer(gap, gap) * (self.count * other.count / count)
        self.mean = self.mean + gap * (other.count / count)
        self.count = count

    def gaussian(self) -> Gaussian:
        if self.count < 2:
            raise DataError(
                f"{counted(self.count, 'image')} cannot have a covariance; give at least 2, and thousands for a figure"
            )
        return Gaussian(self.mean, self.scatter / (self.count - 1))


class Tally:
    """The accumulated statistics of one pass over images; `total` is their number over all processes."""

    def __init__(self, features: str, total: int, *, keep_vectors: bool = True) -> None:
        self.features, self.total, self.keep_vectors = features, total, keep_vectors
        self.moments: dict[str, Moments] = {}
        self.vectors: list[np.ndarray] = []
        self.score: dict[str, np.ndarray] = {}

    @property
    def count(self) -> int:
        return self.moments["pool"].count if self.moments else 0

    def add(self, batch: Activations, first: int) -> None:
        """Add a batch whose first image has the index `first` in the whole set."""
        pool = batch.pool.float().cpu().numpy()  # (B, D)
        if not np.isfinite(pool).all():
            raise DataError(f"an image among {first}..{first + len(pool) - 1} has features that are not finite")
        for name, rows in (("pool", pool), ("spatial", batch.spatial)):
            if rows is not None:
                rows = rows if isinstance(rows, np.ndarray) else rows.float().cpu().numpy()
                self.moments.setdefault(name, Moments(rows.shape[1])).add(rows)
        if self.keep_vectors:
            self.vectors.append(pool)
        if batch.probabilities is not None:
            self._add_score(batch.probabilities.double().cpu().numpy(), first)

    def _add_score(self, probabilities: np.ndarray, first: int) -> None:
        splits = max(1, self.total // SPLIT)
        if not self.score:
            classes = probabilities.shape[1]
            self.score = {"counts": np.zeros(splits), "sums": np.zeros((splits, classes)), "logs": np.zeros(splits)}
        # interleaved: in a folder sorted by class, contiguous splits would hold few classes
        split = np.arange(first, first + len(probabilities)) % splits  # (B,)
        logs = np.log(probabilities, where=probabilities > 0, out=np.zeros_like(probabilities))  # (B, C)
        np.add.at(self.score["counts"], split, 1)
        np.add.at(self.score["sums"], split, probabilities)
        np.add.at(self.score["logs"], split, (probabilities * logs).sum(1))

    def merge(self, other: "Tally") -> None:
        """Append the tally of the images that follow these."""
        for name, moments in other.moments.items():
            self.moments.setdefault(name, Moments(len(moments.mean))).merge(moments)
        self.vectors += other.vectors
        for name, values in other.score.items():
            self.score[name] = self.score[name] + values if name in self.score else values.copy()

    def statistics(self) -> Statistics:
        if not self.moments:
            raise DataError("no images were seen; there is nothing to compare")
        spatial = self.moments.get("spatial")
        score = self.score
        return Statistics(
            features=self.features,
            count=self.count,
            pool=self.moments["pool"].gaussian(),
            spatial=spatial.gaussian() if spatial else None,
            vectors=np.concatenate(self.vectors) if self.vectors else None,
            score=inception_score(score["counts"], score["sums"], score["logs"]) if score else None,
        )

    def save(self, path: Path) -> None:
        arrays = {"features": np.array(self.features), "total": np.array(self.total)}
        arrays["keep_vectors"] = np.array(self.keep_vectors)
        for name, moments in self.moments.items():
            parts = {"count": np.array(moments.count), "mean": moments.mean, "scatter": moments.scatter}
            arrays |= {f"{name}.{part}": value for part, value in parts.items()}
        arrays |= {f"score.{name}": values for name, values in self.score.items()}
        if self.vectors:
            arrays["vectors"] = np.concatenate(self.vectors)  # (N, D)
        with atomic_write(path) as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]

    @classmethod
    def load(cls, path: Path) -> Self:
        with reading(path), np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
            total, keep = (_whole(arrays[name], name, path) for name in ("total", "keep_vectors"))
            tally = cls(str(arrays["features"]), total, keep_vectors=bool(keep))
            for name in ("pool", "spatial"):
                if (read := _read_gaussian(arrays, f"{name}.mean", f"{name}.scatter", path)) is not None:
                    moments = tally.moments[name] = Moments(0)
                    moments.count = _whole(arrays[f"{name}.count"], f"{name}.count", path)
                    moments.mean, moments.scatter = read
            tally.score = {name[6:]: values for name, values in arrays.items() if name.startswith("score.")}
            tally.vectors = [arrays["vectors"]] if "vectors" in arrays else []
            tally._check(path)
        return tally

    def _check(self, path: Path) -> None:
        """Refuse a file whose arrays have inconsistent shapes."""
        width = len(self.moments["pool"].mean) if "pool" in self.moments else 0
        shapes = {name: values.shape for name, values in self.score.items()}
        splits = shapes.get("counts", (0,))
        fits = not shapes or (
            set(shapes) == {"counts", "sums", "logs"}
            and len(splits) == 1
            and shapes["logs"] == splits
            and len(shapes["sums"]) == 2
            and shapes["sums"][:1] == splits
        )
        vectors_fit = all(rows.shape == (self.count, width) for rows in self.vectors)
        numbers = [*self.vectors, *self.score.values()]
        if not fits or not vectors_fit or any(array.dtype.kind not in "fiu" for array in numbers):
            raise DataError(f"{path} has arrays that do not belong together: remove it, and measure again")
