"""The user's goal: a speed-up, a limit on the loss gap, or the knee of the Pareto front."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tread.autotune.search import Plan, at_speed, from_knee, within_gap
from tread.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A speed-up or a loss gap; with neither, the choice is the knee of the front."""

    speedup: float | None = None
    """Lower bound of dense over routed seconds of a step."""
    gap: float | None = None
    """Upper bound of the loss gap."""

    def __post_init__(self) -> None:
        if self.speedup is not None and not 1 < self.speedup < float("inf"):
            raise ConfigError(
                f"--target-speedup is {self.speedup}; it must be above 1, which dense training has, and finite."
            )
        if self.gap is not None and not 0 < self.gap < float("inf"):
            raise ConfigError(
                f"--max-loss-gap is {self.gap}; it must be above 0 and finite: 0.02 allows 2 % more loss."
            )

    def ordered(self, plans: Sequence[Plan], dense: float) -> list[Plan]:
        """The plans of a front that reach the goal, the best first; `dense` are the seconds of a dense step."""
        if self.speedup is not None:
            return at_speed(plans, dense, self.speedup)
        return from_knee(plans) if self.gap is None else within_gap(plans, self.gap)

    def allows(self, gap: float) -> bool:
        """Whether a loss gap keeps to the goal; any does where the goal is another."""
        return self.gap is None or gap <= self.gap

    def best(self, measured: Mapping[str, tuple[float, float]]) -> list[str]:
        """The plans whose measured speed-up and gap, given by name in the order of the search, reach the goal.

        For a speed-up the smallest gap comes first, otherwise the order stays.
        """
        reaching = [
            name
            for name, (speedup, gap) in measured.items()
            if self.allows(gap) and (self.speedup is None or speedup >= self.speedup)
        ]
        return reaching if self.speedup is None else sorted(reaching, key=lambda name: measured[name][1])

    def __str__(self) -> str:
        if self.speedup is not None:
            return f"steps {self.speedup:g} times as fast as dense ones"
        return "the knee of the front" if self.gap is None else f"a loss gap of at most {self.gap:.2%}"
