"""Sensitivity to dropped tokens without training: the loss gap of a window, and heat maps of all windows.

The gap is the routed loss over the dense one, minus 1, on fixed samples and noise, averaged over noise levels. It is
cheap but does not measure quality: it always prefers fewer dropped tokens, and long runs do not (docs/autotune.md). The
tuner uses it to choose between plans of equal speed, within the rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tread.autotune.cost import Routes, routes_of
from tread.errors import ConfigError

Losses = Sequence[Sequence[float]]
"""Dense and routed loss at each noise level."""


def gap(losses: Losses) -> float:
    """Routed over dense loss, minus 1, each a mean over the noise levels.

    >>> gap([(1.0, 1.5), (3.0, 3.5)])
    0.25
    """
    dense, routed = (sum(some) for some in zip(*losses, strict=True))
    return routed / dense - 1


def gaps_by_level(losses: Losses) -> list[float]:
    """The gap at each noise level, from the least noise to the most."""
    return [routed / dense - 1 for dense, routed in losses]


def check_gaps(losses: Mapping[str, Losses], advice: str) -> None:
    """Refuse meaningless losses: NaN or infinite ones, or a model whose loss no dropped token changes.

    `advice` says how to measure on trained weights.
    """
    finite = [pair for some in losses.values() for pair in some]
    if any(not 0 < loss < float("inf") for pair in finite for loss in pair):
        raise ConfigError(
            "the loss of this model is 0 or not finite on the first batches, so nothing can be compared with it: look "
            "at the model and the data with `tread doctor`."
        )
    if all(dense == routed for dense, routed in finite):
        raise ConfigError(
            f"dropping tokens changes no prediction of this model, as of one whose weights are new: {advice}."
        )


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """The gaps of single windows of one ratio, by start and end."""

    ratio: float
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    gaps: Mapping[tuple[int, int], float]
    """Gap by (start, end), for measured windows only."""


def heat_maps(losses: Mapping[str, Losses]) -> list[HeatMap]:
    """A map for each ratio that single windows were measured at."""
    found: dict[float, dict[tuple[int, int], float]] = {}
    for key, some in losses.items():
        routes: Routes = routes_of(key)
        if len(routes) == 1:
            (route,) = routes
            found.setdefault(route.selection_ratio, {})[route.start_layer_idx, route.end_layer_idx] = gap(some)
    return [
        HeatMap(
            ratio=ratio,
            starts=tuple(sorted({start for start, _ in gaps})),
            ends=tuple(sorted({end for _, end in gaps})),
            gaps=gaps,
        )
        for ratio, gaps in sorted(found.items())
    ]
