"""A cost model of a training step under any plan, fitted to timed steps.

- Whole optimizer steps of the user's own job are timed, so precision, adapter, checkpointing, compiled layers and CUDA
  graphs are those of the run, and effects that cannot be separated (a host that runs ahead, overlapping kernels) are
  included. Windows span all or half of a stack at the same two ratios: each ratio is a sequence length to compile for.
- A layer's time is linear in its tokens, for matrix products, plus quadratic, for attention; a window has an overhead
  for selecting, gathering and restoring. So a step takes

      fixed + window * windows + sum over layers (linear * k + square * k^2),    k = kept tokens / all tokens

  with one linear and one square per stack and no negative coefficient: fewer tokens are never slower. A layer's cost
  that does not depend on tokens is in `fixed`, because every layer runs in every plan.
- The saving of a window does not depend on the other windows, which makes the search exact.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from tread.routing.budget import kept_count
from tread.routing.route import Route

Routes = tuple[Route, ...]
"""The routes of a plan, resolved and in order; the empty tuple is dense."""


def key_of(routes: Sequence[Route]) -> str:
    """The key of a plan in the stored measurements; ratios are written with all their digits.

    >>> key_of((Route(selection_ratio=0.5, start_layer_idx=2, end_layer_idx=8),)), key_of(())
    ('2..8@0.5', 'dense')
    """
    return " ".join(f"{r.start_layer_idx}..{r.end_layer_idx}@{r.selection_ratio}" for r in routes) or "dense"


def routes_of(key: str) -> Routes:
    """The inverse of `key_of`."""
    routes = []
    for word in [] if key == "dense" else key.split():
        window, _, ratio = word.partition("@")
        start, _, end = window.partition("..")
        routes.append(Route(selection_ratio=float(ratio), start_layer_idx=int(start), end_layer_idx=int(end)))
    return tuple(routes)


def ratios_of(plans: Iterable[Routes]) -> list[float]:
    """The distinct ratios of some plans, ascending; with dense, each is one sequence length that layers see."""
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
    """The most tokens that a mask forces in a sample; None without masks."""
    always: int = 0
    """Tokens that are forced in every sample: those of references."""
    measured: Mapping[float, int] = field(default_factory=dict)
    """Measured numbers of kept tokens by ratio; others are computed."""

    def kept(self, ratio: float) -> int:
        """The number of tokens that a route of this ratio keeps."""
        seen = self.measured.get(ratio)
        return kept_count(self.count, ratio, self.forced, self.always) if seen is None else seen


def probes(stacks: Sequence[Stack], ratios: Sequence[float], *, first: int, last: int) -> list[Routes]:
    """The plans to time: dense; for each stack its layers within `first`..`last` at two ratios, and its halves at one.

    With dense these are three sequence lengths, as many as a layer has coefficients. The ratios are the lowest and the
    highest, so that others are interpolated. Layers outside `first`..`last` are not routed: no window may have them.
    """
    low, high = min(ratios), max(ratios)
    plans: list[Routes] = [()]
    for stack in stacks:
        start, end = max(stack.first, first), min(stack.last, last)
        if start > end:
            continue
        plans += [one_window(ratio, start, end) for ratio in sorted({low, high})]
        half = start + (end - start + 1) // 2
        if half > start:
            plans += [one_window(high, start, half - 1), one_window(high, half, end)]
    return plans


def one_window(ratio: float, first: int, last: int) -> Routes:
    """The plan of a single window, of the layers `first`..`last`."""
    return (Route(selection_ratio=ratio, start_layer_idx=first, end_layer_idx=last),)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a step as a function of its plan."""

    stacks: tuple[Stack, ...]
    tokens: Tokens
    fixed: float
    window: float
    """Overhead of a window in seconds."""
    linear: tuple[float, ...]
    square: tuple[float, ...]
    """Seconds of one layer of each stack, of its products and its attention, at all tokens."""
    error: float
    """The largest relative error of the prediction for a timed probe."""

    def seconds(self, routes: Sequence[Route]) -> float:
        """The predicted time of a step; dense without routes."""
        coefficients = np.array([self.fixed, self.window, *self.linear, *self.square])
        return float(terms(routes, self.stacks, self.tokens) @ coefficients)

    def saving(self, route: Route) -> float:
        """Seconds that one window saves in any plan; negative if its overhead is larger than its saving."""
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
    """A row of the design matrix: 1, the number of windows, the sum of k for each stack, then the sum of k^2."""
    kept: dict[int, float] = {}
    for route in routes:
        share = tokens.kept(route.selection_ratio) / tokens.count
        kept |= dict.fromkeys(route.layers, share)
    shares = [[kept.get(layer, 1.0) for layer in range(stack.first, stack.last + 1)] for stack in stacks]
    sums = [sum(stack_shares) for stack_shares in shares], [sum(k * k for k in stack_shares) for stack_shares in shares]
    return np.array([1.0, len(routes), *sums[0], *sums[1]])


def fit(seconds: Mapping[Routes, float], stacks: Sequence[Stack], tokens: Tokens) -> Cost:
    """Fit the cost model to timed plans by nonnegative least squares on relative errors.

    Terms that are equal in all plans, such as those of stacks that none routes, are absorbed by `fixed`.
    """
    rows = np.stack([terms(routes, stacks, tokens) for routes in seconds])  # (N, P)
    times = np.array(list(seconds.values()))
    varying = np.array([True, *(rows.min(axis=0) < rows.max(axis=0))[1:]])
    coefficients = np.zeros(rows.shape[1])
    coefficients[varying] = _nonnegative(rows[:, varying] / times[:, None], np.ones_like(times))
    predicted = rows @ coefficients
    count = len(stacks)
    return Cost(
        stacks=tuple(stacks),
        tokens=tokens,
        fixed=float(coefficients[0]),
        window=float(coefficients[1]),
        linear=tuple(map(float, coefficients[2 : 2 + count])),
        square=tuple(map(float, coefficients[2 + count :])),
        error=float(np.abs(predicted / times - 1).max()),
    )


def _nonnegative(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Nonnegative least squares: the x (P,) >= 0 that minimises |rows x - values|, rows (N, P), values (N,).

    Exact, by enumerating the supports of x, of which there are few: P is at most a dozen.
    """
    best, error = np.zeros(rows.shape[1]), np.inf
    for chosen in product((False, True), repeat=rows.shape[1]):
        used = np.array(chosen)
        if not used.any():
            continue
        solution, *_ = np.linalg.lstsq(rows[:, used], values, rcond=None)
        if solution.min() < 0:
            continue
        residual = float(((rows[:, used] @ solution - values) ** 2).sum())
        if residual < error:
            best, error = np.zeros(rows.shape[1]), residual
            best[used] = solution
    return best
