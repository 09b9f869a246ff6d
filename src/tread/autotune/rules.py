"""Which routes may be proposed: those that carry none of the risks that tread warns about.

Measured sensitivity does not predict long runs: a ratio that won after 30 seconds lost after 430 (docs/results.md).
The limits that held in every run are in `tread.routing.risks`, and the tuner keeps to them: first and last layer,
layers that a dropped token still passes, the ratio on few tokens and that of an adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tread.errors import ConfigError
from tread.routing.plan import PRESETS, RoutePlan
from tread.routing.risks import (
    ADAPTER_RATIO,
    EARLIEST_START,
    FEW_TOKENS,
    FEWEST_LAYERS,
    HIGH_RATIO,
    adapter_risks,
    layer_risks,
    token_risks,
)
from tread.routing.route import Route

RATIOS = (0.25, 0.4, 0.5, 0.6, 0.75)
"""Ratios to try; each is a sequence length that layers are compiled for."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The limits for one model and one sample size."""

    depth: int
    tokens: int
    """Image tokens of a sample, without references."""
    adapts: bool
    """Whether only an adapter is trained."""

    def broken(self, routes: Sequence[Route]) -> list[str]:
        """The risks of a plan with these routes, in the words of their warnings; empty if it may be proposed."""
        plan = RoutePlan(routes=tuple(routes)).resolve(self.depth)
        risks = layer_risks(plan) + token_risks(plan, self.tokens)
        return risks + (adapter_risks(plan) if self.adapts else [])

    @property
    def ceiling(self) -> float | None:
        """The highest ratio allowed; None if no rule limits it."""
        limits = [ADAPTER_RATIO] * self.adapts + [HIGH_RATIO] * (self.tokens <= FEW_TOKENS)
        return min(limits, default=None)

    @property
    def first(self) -> int:
        """The first layer that a window may have."""
        return EARLIEST_START

    @property
    def last(self) -> int:
        """The last layer that a window may have."""
        return self.depth - 2

    @property
    def longest(self) -> int:
        """The most layers that all windows of a plan may span together."""
        return self.depth - FEWEST_LAYERS

    def ratios(self, asked: Sequence[float] = RATIOS) -> tuple[float, ...]:
        """The allowed ones among the ratios, ascending."""
        return tuple(sorted({ratio for ratio in asked if self.ceiling is None or ratio <= self.ceiling}))

    def windows(self, edges: int) -> list[tuple[int, int]]:
        """Windows (start, end): those of the presets, and those between any two of at most `edges` evenly spread edges.

        >>> Rules(depth=12, tokens=1024, adapts=False).windows(3)
        [(2, 8), (2, 9), (3, 8), (1, 5), (6, 10)]
        """
        first, after = self.first, self.last + 1
        if after <= first:
            return []
        known = {(route.start_layer_idx, route.end_layer_idx + self.depth) for route in PRESETS.values()}
        count = min(edges, after - first + 1) - 1
        bounds = [first + round((after - first) * index / count) for index in range(count + 1)]
        index = {edge: position for position, edge in enumerate(bounds)}
        windows = [(start, end - 1) for start in bounds for end in bounds]
        # every second edge first, so that an interrupted measurement has covered the layers evenly
        windows.sort(key=lambda w: (index[w[0]] % 2 + index[w[1] + 1] % 2, w[0] - w[1], w))
        return [
            (start, end)
            for start, end in dict.fromkeys([*sorted(known), *windows])
            if first <= start <= end <= self.last and end - start + 1 <= self.longest
        ]

    def sentences(self) -> list[str]:
        """The limits in words, for the report."""
        said = [
            f"windows start at layer {self.first} or later and end at layer {self.last} at the latest",
            f"a dropped token passes at least {FEWEST_LAYERS} of the {self.depth} layers: windows that left it three "
            "or two of twelve fell apart",
        ]
        if self.tokens <= FEW_TOKENS:
            lost = "0.75 won after 30 seconds and lost after 430"
            said.append(f"at most {HIGH_RATIO:g} is dropped of {self.tokens} tokens: {lost}")
        if self.adapts:
            said.append(f"at most {ADAPTER_RATIO:g} is dropped while an adapter is trained")
        return said

    def to_config(self) -> dict[str, Any]:
        """The limits as numbers and in words, for the report."""
        return {"first": self.first, "last": self.last, "longest": self.longest, "ceiling": self.ceiling,
                "sentences": self.sentences()}  # fmt: skip


def parse_ratios(text: str | None) -> tuple[float, ...]:
    """The ratios of a command line, ascending.

    >>> parse_ratios("0.5,0.25")
    (0.25, 0.5)
    """
    if text is None:
        return RATIOS
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(f"--ratios is {text!r}; give numbers such as 0.25,0.5.") from None
