"""The time of a training step under any plan, fitted to timed steps.

- What is timed are whole optimizer steps of the user's own job, with windows over all or half of a stack at two
  ratios, the same for all of them, because each is a length to compile for: precision, adapter, checkpointing, compiled
  layers and CUDA graphs are those of the run, and what cannot be taken apart (a host that runs ahead, kernels that
  overlap) need not be.
- A layer's time is linear in its tokens, for products, plus quadratic, for attention; a window costs something for
  selecting, gathering and restoring. So a step takes

      fixed + window * windows + sum over layers (linear * k + square * k^2),    k = kept tokens / all tokens

  with one linear and one square per stack and no negative coefficient: fewer tokens are never slower. What a layer
  costs whatever its tokens is in `fixed`, for every layer runs in every plan.
- The saving of a window does not depend on the other windows, which is what makes the search exact.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from tread.routing.budget import kept_count
from tread.routing.route import Route

Routes = tuple[Route, ...]
"""The routes of a plan, resolved and in order; none is dense."""


def key_of(routes: Sequence[Route]) -> str:
    """The name of a plan among the measurements.

    >>> key_of((Route(selection_ratio=0.5, start_layer_idx=2, end_layer_idx=8),)), key_of(())
    ('2..8@0.5', 'dense')
    """
    return " ".join(f"{r.start_layer_idx}..{r.end_layer_idx}@{r.selection_ratio:g}" for r in routes) or "dense"


def routes_of(key: str) -> Routes:
    """The plan of a name."""
    found = []
    for word in [] if key == "dense" else key.split():
        window, _, ratio = word.partition("@")
        start, _, end = window.partition("..")
        found.append(Route(selection_ratio=float(ratio), start_layer_idx=int(start), end_layer_idx=int(end)))
    return tuple(found)


def ratios_of(plans: Iterable[Routes]) -> list[float]:
    """The ratios of some plans, each once: with dense, they are the lengths of the stream that layers see."""
    return sorted({route.selection_ratio for routes in plans for route in routes})


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A list of layers that cost the same: layers `first`..`last` of the model."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The image tokens of a batch, as the budget counts them."""

    count: int
    forced: int | None = None
    """The most tokens that a mask forces in a sample; None: no mask."""
    always: int = 0
    """Tokens that are forced in every sample: those of references."""
    measured: Mapping[float, int] = field(default_factory=dict)
    """What routes of some ratios were seen to keep."""

    def kept(self, ratio: float) -> int:
        """The tokens that a route keeps."""
        found = self.measured.get(ratio)
        return kept_count(self.count, ratio, self.forced, self.always) if found is None else found


def probes(stacks: Sequence[Stack], ratios: Sequence[float], *, first: int, last: int) -> list[Routes]:
    """The plans to time: dense, what a stack has of layers `first`..`last` at two ratios, and its halves at one.

    With dense these are three lengths, as many as a layer's coefficients: the lowest ratio and the highest, so that
    others lie between. Layers that no window may have are never routed: their code would be compiled for nothing.
    """
    low, high = min(ratios), max(ratios)
    found: list[Routes] = [()]
    for stack in stacks:
        start, end = max(stack.first, first), min(stack.last, last)
        if start > end:
            continue
        found += [_window(ratio, start, end) for ratio in sorted({low, high})]
        half = start + (end - start + 1) // 2
        if half > start:
            found += [_window(high, start, half - 1), _window(high, half, end)]
    return found


def _window(ratio: float, first: int, last: int) -> Routes:
    return (Route(selection_ratio=ratio, start_layer_idx=first, end_layer_idx=last),)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a step as a function of its plan."""

    stacks: tuple[Stack, ...]
    tokens: Tokens
    fixed: float
    window: float
    """Seconds that a window costs whatever it saves."""
    linear: tuple[float, ...]
    square: tuple[float, ...]
    """Seconds of one layer of each stack, of its products and its attention, at all tokens."""
    error: float
    """The largest relative difference between a timed probe and what is predicted for it."""

    def seconds(self, routes: Sequence[Route]) -> float:
        """The predicted time of a step; no routes: dense."""
        coefficients = np.array([self.fixed, self.window, *self.linear, *self.square])
        return float(terms(routes, self.stacks, self.tokens) @ coefficients)

    def saving(self, route: Route) -> float:
        """Seconds that one window saves in any plan; negative if it costs more than it saves."""
        return self.seconds(()) - self.seconds((route,))

    def speedup(self, routes: Sequence[Route]) -> float:
        """Predicted dense over routed seconds."""
        return self.seconds(()) / self.seconds(routes)

    def to_config(self) -> dict[str, Any]:
        """The coefficients, by name."""
        return {
            "fixed": self.fixed,
            "window": self.window,
            "layers": {
                stack.name: {"linear": linear, "square": square}
                for stack, linear, square in zip(self.stacks, self.linear, self.square, strict=True)
            },
            "error": self.error,
        }


def terms(routes: Sequence[Route], stacks: Sequence[Stack], tokens: Tokens) -> np.ndarray:
    """What the coefficients of a plan's time are multiplied with: 1, windows, and per stack sums of k, then of k^2."""
    kept: dict[int, float] = {}
    for route in routes:
        share = tokens.kept(route.selection_ratio) / tokens.count
        kept |= dict.fromkeys(range(route.start_layer_idx, route.end_layer_idx + 1), share)
    shares = [[kept.get(layer, 1.0) for layer in range(stack.first, stack.last + 1)] for stack in stacks]
    sums = [sum(some) for some in shares], [sum(k * k for k in some) for some in shares]
    return np.array([1.0, len(routes), *sums[0], *sums[1]])


def fit(seconds: Mapping[Routes, float], stacks: Sequence[Stack], tokens: Tokens) -> Cost:
    """The cost that is nearest to timed plans in the mean of squared relative differences.

    Layers that none of them routes take as long in all of them: their time is in `fixed`.
    """
    rows = np.stack([terms(routes, stacks, tokens) for routes in seconds])  # (N, P)
    times = np.array(list(seconds.values()))
    told = np.array([True, *(rows.min(axis=0) < rows.max(axis=0))[1:]])
    found = np.zeros(rows.shape[1])
    found[told] = _nonnegative(rows[:, told] / times[:, None], np.ones_like(times))
    predicted = rows @ found
    count = len(stacks)
    return Cost(
        stacks=tuple(stacks),
        tokens=tokens,
        fixed=float(found[0]),
        window=float(found[1]),
        linear=tuple(map(float, found[2 : 2 + count])),
        square=tuple(map(float, found[2 + count :])),
        error=float(np.abs(predicted / times - 1).max()),
    )


def _nonnegative(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Nonnegative least squares, rows (N, P) times result (P,) near values (N,).

    With at most a dozen coefficients the exact way is also the short one: the best of all choices of those that are not
    zero.
    """
    best, error = np.zeros(rows.shape[1]), np.inf
    for chosen in product((False, True), repeat=rows.shape[1]):
        used = np.array(chosen)
        if not used.any():
            continue
        some, *_ = np.linalg.lstsq(rows[:, used], values, rcond=None)
        if some.min() < -1e-12:
            continue
        here = float(((rows[:, used] @ some - values) ** 2).sum())
        if here < error:
            best, error = np.zeros(rows.shape[1]), here
            best[used] = np.maximum(some, 0.0)
    return best
