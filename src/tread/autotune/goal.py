"""What is asked of a tuning: a goal, and the options it runs under, checked when they are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tread.autotune.rules import RATIOS
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
        """The routed plans of a front that reach the goal, the best first; `dense` are the seconds of a dense step."""
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


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line."""

    config: str | None
    settings: Sequence[str]
    goal: Goal
    out: Path | None = None
    budget_minutes: float = 30.0
    verify_minutes: float | None = None
    ratios: Sequence[float] = RATIOS
    edges: int = 8
    """Number of layers at which windows may begin and end; every pair of them is a window."""
    windows: int = 2
    """Most windows of a plan."""
    start_steps: int = 200
    """Dense steps before sensitivity is measured, if the model is untrained."""

    def __post_init__(self) -> None:
        for name, value in (("--budget-minutes", self.budget_minutes), ("--verify", self.verify_minutes)):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; it must be a number of minutes above 0.")
        counts = ("--edges", self.edges, 2), ("--windows", self.windows, 1), ("--start-steps", self.start_steps, 0)
        for name, value, low in counts:
            if value < low:
                raise ConfigError(f"{name} is {value}; it must be at least {low}.")
        if not 1 <= len(self.ratios) <= len(RATIOS) or not all(0 < ratio < 1 for ratio in self.ratios):
            raise ConfigError(
                f"--ratios is {list(self.ratios)}; give one to {len(RATIOS)} fractions of tokens to drop, each between "
                "0 and 1: each is compiled for."
            )
