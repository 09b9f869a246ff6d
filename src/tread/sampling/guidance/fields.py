"""Guidance as functions from fields to a field.

- Every guidance here is weak + scale * (strong - weak). The weak branch lacks a label (classifier-free), tokens
  (Sparse Guidance), training (AutoGuidance), or two of these.
- A branch that the formula does not need is not run: scale 1, and any level outside the interval, cost one
  plain evaluation.
- The branches of classifier-free guidance go through the network as one batch, conditional half first. Branches of
  different lengths or networks cannot.
- Levels are Python floats, so intervals and ratios are decided on the host.
- The tokens that a sparse branch drops are a hash of seed, level, sample and token. So a sample depends neither on its
  batch nor on earlier draws, and the branches of one evaluation are nested: the weak one keeps a subset of the tokens
  of the strong one, and with equal ratios they are equal.
"""

import math
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tread.errors import ConfigError
from tread.objectives.objective import Field, check_number
from tread.routing import noise
from tread.routing.handle import Handle

Ratio = Callable[[float], float]
"""Level -> the fraction of tokens dropped."""


# Karras et al. 2024 (arXiv 2406.02507) Eq. 3, with weak as the lesser network; Krause et al. 2026 (arXiv 2601.01608)
# with weak as the sparser one
def away_from(weak: Field, strong: Field, *, scale: float, interval: tuple[float, float] | None = None) -> Field:
    """weak + scale * (strong - weak): 1 is the strong field alone, 0 the weak one.

    `interval` (lo, hi) limits guidance to levels with lo < level <= hi, in the objective's own unit (EDM: sigma,
    flow: t); elsewhere the strong field runs alone.
    """
    check_scale(scale, interval)
    if scale == 1:
        return strong

    def guided(x: Tensor, level: float, labels: Tensor) -> Tensor:
        if not within(level, interval):
            return strong(x, level, labels)
        lesser = weak(x, level, labels)
        return lesser if scale == 0 else lesser + scale * (strong(x, level, labels) - lesser)

    return guided


# Ho and Salimans 2022 (arXiv 2207.12598) Eq. 6, with scale = 1 + w; the interval is that of Kynkäänniemi et
# al. 2024 (arXiv 2404.07724)
def classifier_free(
    field: Field, *, scale: float, null_label: int | None, interval: tuple[float, float] | None = None
) -> Field:
    """uncond + scale * (cond - uncond), both in one batch; `scale` and `interval` as in `away_from`.

    `null_label` is the label that stands for no class, None if the network has none.
    """
    check_scale(scale, interval)
    if scale == 1:
        return field
    null_label = check_null_label(null_label, scale)

    def guided(x: Tensor, level: float, labels: Tensor) -> Tensor:
        if not within(level, interval):
            return field(x, level, labels)
        null = torch.full_like(labels, null_label)
        if scale == 0:
            return field(x, level, null)
        both = field(torch.cat([x, x]), level, torch.cat([labels, null]))  # (2B, C, H, W)
        cond, uncond = both.chunk(2)  # (B, C, H, W) each
        return uncond + scale * (cond - uncond)

    return guided


def unconditional(field: Field, null_label: int) -> Field:
    """The field with the null label."""
    return lambda x, level, labels: field(x, level, torch.full_like(labels, null_label))


def sparse(
    field: Field, handle: Handle, ratio: Ratio, *, seed: int | Tensor = 0, samples: Tensor | None = None
) -> Field:
    """The field of a network that drops `ratio(level)` of the tokens on the routes of its `handle`; dense at 0.

    `samples` (B,) are the indices of the batch's samples in the whole job, `seed` is one for all of them or one for
    each, (B,); a batch of twice the size repeats them.
    """

    def dropped(x: Tensor, level: float, labels: Tensor) -> Tensor:
        indices = None if samples is None else samples.repeat(x.shape[0] // samples.shape[0])
        seeds = seed.repeat(x.shape[0] // seed.shape[0]) if isinstance(seed, Tensor) else seed
        with dropping(handle, ratio(level), seed=seeds, level=level, samples=indices):
            return field(x, level, labels)

    return dropped


def dropping(
    handle: Handle, ratio: float, *, seed: int | Tensor, level: float, samples: Tensor | None = None
) -> AbstractContextManager[None]:
    """Forwards inside drop `ratio` of the tokens, selected by a hash of the arguments; 0 is dense."""
    if ratio == 0:
        return handle.dense()
    (word,) = struct.unpack("<I", struct.pack("<f", level))  # the bits of a float32
    step = noise.bits(seed, word)
    return handle.routed(ratio, step=step if isinstance(seed, Tensor) else int(step), samples=samples)


def constant(value: float) -> Ratio:
    """The same ratio at every level."""
    return lambda level: value


def cosine(first: float, last: float, levels: Sequence[float]) -> Ratio:
    """Half a cosine from `first` at the first of the falling `levels` to `last` at the last one that is not 0.

    >>> ratio = cosine(0.6, 0.0, [1.0, 0.75, 0.5, 0.25, 0.1, 0.0])
    >>> [round(ratio(level), 3) for level in (1.0, 0.75, 0.5, 0.25, 0.1)]
    [0.6, 0.512, 0.3, 0.088, 0.0]
    """
    spacings = max(len(levels) - 2, 1)

    def ratio(level: float) -> float:
        done = min(sum(other > level for other in levels) / spacings, 1.0)
        return last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * done))

    return ratio


def within(level: float, interval: tuple[float, float] | None) -> bool:
    """Whether lo < level <= hi; True without an interval."""
    return interval is None or interval[0] < level <= interval[1]


def check_scale(scale: float, interval: tuple[float, float] | None) -> None:
    """Refuse a scale that is not a finite number >= 0, and an empty interval."""
    check_number("guidance", scale, at_least=0)
    check_interval(interval, "guidance interval")


def check_interval(interval: tuple[float, float] | None, name: str) -> None:
    """Refuse an empty interval."""
    if interval is not None and not interval[0] < interval[1]:
        raise ConfigError(f"{name} is ({interval[0]}, {interval[1]}); its lower end must be below its upper end.")


def check_nested(strong_ratio: float, weak_ratio: float) -> None:
    """Refuse a weak branch that keeps more tokens than the strong one."""
    if weak_ratio < strong_ratio:
        raise ConfigError(
            f"weak ratio is {weak_ratio} and strong ratio {strong_ratio}; the weak branch must drop at least as much. "
            "Raise the weak ratio or lower the strong one."
        )


def check_null_label(null_label: int | None, scale: float) -> int:
    """The null label; refused if the network has none."""
    if null_label is None:
        raise ConfigError(
            f"guidance is {scale}, but the model has no label for 'no class'; set guidance to 1, or train it "
            "with class dropout."
        )
    return null_label
