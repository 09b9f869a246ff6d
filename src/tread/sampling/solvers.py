"""ODE solvers: free functions over a field, from noise to data.

- A solver takes a field (the slope dx/dlevel), the starting state `x` = levels[0] * noise, and falling levels that end
  at 0. It knows nothing of networks, objectives or guidance.
- No solver evaluates the field at level 0, where EDM's slope is undefined and a logit-normal flow was never trained. So
  Heun's last step is an Euler step; one step with a second-order local error leaves the method second order.
- Churn's noise comes in through `draw`, so that a solver has no random state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from typing import Protocol

from torch import Tensor

from tread.errors import ConfigError
from tread.objectives.objective import Field, check_number


class Solver(Protocol):
    """A function that integrates `field` from the state x (B, C, H, W) at levels[0] down to level 0."""

    def __call__(self, field: Field, x: Tensor, labels: Tensor, levels: list[float]) -> Tensor: ...


Draw = Callable[[int], Tensor]
"""The index of a step -> standard normal noise shaped like the state."""


def euler(field: Field, x: Tensor, labels: Tensor, levels: list[float]) -> Tensor:
    """Euler's method: first order, one evaluation a step."""
    for level, lower in pairwise(levels):
        x = x + (lower - level) * field(x, level, labels)
    return x


def heun(field: Field, x: Tensor, labels: Tensor, levels: list[float]) -> Tensor:
    """Heun's method: second order, two evaluations a step and one in the last."""
    for level, lower in pairwise(levels):
        x = _heun_step(field, x, labels, level, lower)
    return x


# Karras et al. 2022, Algorithm 2, lines 7 to 11
def _heun_step(field: Field, x: Tensor, labels: Tensor, level: float, lower: float) -> Tensor:
    slope = field(x, level, labels)
    ahead = x + (lower - level) * slope
    if lower == 0:
        return ahead
    return x + (lower - level) * 0.5 * (slope + field(ahead, lower, labels))


@dataclass(frozen=True, kw_only=True)
class Churn:
    """The fresh noise that Algorithm 2 of Karras et al. 2022 adds before each step."""

    s_churn: float
    """Total amount, spread over the steps; no step raises its level by more than a factor sqrt(2)."""
    s_tmin: float = 0.0
    """No noise is added below this level."""
    s_tmax: float = inf
    """No noise is added above this level."""
    s_noise: float = 1.0
    """Standard deviation of the fresh noise; slightly above 1 compensates for detail that a network smooths away."""

    def __post_init__(self) -> None:
        for setting in ("s_churn", "s_tmin", "s_noise"):
            check_number(f"churn.{setting}", getattr(self, setting), at_least=0)
        if self.s_tmax != inf:
            check_number("churn.s_tmax", self.s_tmax)
        if self.s_tmin >= self.s_tmax:
            raise ConfigError(
                f"churn.s_tmin is {self.s_tmin} and churn.s_tmax is {self.s_tmax}; s_tmin must be the smaller one."
            )

    # Algorithm 2, line 2 and line 5
    def raised(self, level: float, steps: int) -> float:
        """The level after the fresh noise of one of `steps` steps."""
        if not self.s_tmin <= level <= self.s_tmax:
            return level
        return level * (1.0 + min(self.s_churn / steps, sqrt(2.0) - 1.0))


def churn_of(amount: float, interval: tuple[float, float] | None, noise: float) -> Churn | None:
    """Churn of a total `amount` between two levels, with fresh noise of the std `noise`; None for an amount of 0."""
    low, high = (0.0, inf) if interval is None else interval
    return Churn(s_churn=amount, s_tmin=low, s_tmax=high, s_noise=noise) if amount else None


# Karras et al. 2022, Algorithm 2
def edm_heun(field: Field, x: Tensor, labels: Tensor, levels: list[float], *, churn: Churn, draw: Draw) -> Tensor:
    """Heun's method with churn; only for states that are data plus level times noise."""
    for step, (level, lower) in enumerate(pairwise(levels)):
        raised = churn.raised(level, len(levels) - 1)
        if raised > level:
            x = x + sqrt(raised**2 - level**2) * churn.s_noise * draw(step)
        x = _heun_step(field, x, labels, raised, lower)
    return x


SOLVERS: dict[str, Solver] = {"euler": euler, "heun": heun}
