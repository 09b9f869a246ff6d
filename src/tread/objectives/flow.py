"""Rectified flow, the linear path that SiT trains on (Liu et al. 2022, arXiv 2209.03003; Lipman et al. 2022,
arXiv 2210.02747; time distributions from Esser et al. 2024, arXiv 2403.03206).

- Time runs from the data at t = 0 to the noise at t = 1, as in Esser et al. (Liu and Lipman have it the other
  way round). So levels rise with the noise as in EDM, and sampling descends in both.
- The level is t. The network predicts the velocity noise - x, which is dx_t/dt, the field itself.
- `shift` moves the training times and the sampling levels alike.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, get_args

from torch import Tensor

from tread.errors import ConfigError, check_choice
from tread.objectives.density import logit_normal
from tread.objectives.objective import (
    Field,
    Net,
    at_least_float32,
    check_number,
    check_steps,
    mean_square,
    per_sample,
    predict,
)

Time = Literal["uniform", "logit-normal"]
T = TypeVar("T", float, Tensor)


# Esser et al. Eq. 13
def path_state(x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) x + t noise, the state at time t (B,) on the straight path from x to noise, (B, C, ...)."""
    at = per_sample(t, x)  # (B, 1, ...)
    return (1.0 - at) * x + at * noise


# Esser et al. Eq. 23, with shift for sqrt(m / n)
def shifted(t: T, shift: float) -> T:
    """A time moved towards the noise by a shift above 1."""
    return shift * t / (1.0 + (shift - 1.0) * t)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The rectified-flow objective.

    >>> Flow().levels(4)
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """

    time: Time = "uniform"
    """Distribution of t in training."""
    logit_mean: float = 0.0
    """Mean of logit(t) when time is logit-normal; above 0 trains more on noisy states."""
    logit_std: float = 1.0
    """Standard deviation of logit(t) when time is logit-normal."""
    shift: float = 1.0
    """Above 1 moves all times towards the noise, as large images need."""

    default_solver: ClassVar[str] = "euler"
    additive_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice(self.time, "objective.time", get_args(Time))
        check_number("objective.logit_mean", self.logit_mean)
        check_number("objective.logit_std", self.logit_std, above=0)
        check_number("objective.shift", self.shift, above=0)
        if self.time == "uniform" and (self.logit_mean, self.logit_std) != (0.0, 1.0):
            raise ConfigError(
                f"objective.logit_mean is {self.logit_mean} and objective.logit_std is {self.logit_std}, but "
                "objective.time is 'uniform', which uses neither; set objective.time to 'logit-normal'."
            )

    def level(self, u: Tensor) -> Tensor:
        """The u-quantile of t, (B,) -> (B,)."""
        t = at_least_float32(u)
        if self.time == "logit-normal":
            t = logit_normal(t, self.logit_mean, self.logit_std)
        return shifted(t, self.shift)

    def velocity(self, net: Net, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """The network's prediction of noise - x at x_t, (B, C, H, W); t (B,)."""
        x = at_least_float32(x)
        return predict(net, x, t.to(x.dtype), labels)

    # Liu et al. Eq. 1 and Lipman et al. Eq. 23 (sigma_min = 0)
    def loss(self, net: Net, x: Tensor, labels: Tensor, *, noise: Tensor, u: Tensor) -> Tensor:
        """(B,): each sample's mean over its elements of the squared error of the velocity."""
        x = at_least_float32(x)
        noise = noise.to(x.dtype)
        t = self.level(u)
        x_t = path_state(x, noise, t)
        return mean_square(self.velocity(net, x_t, t, labels) - (noise - x))

    def field(self, net: Net) -> Field:
        """See `Objective.field`."""

        def slope(x: Tensor, level: float, labels: Tensor) -> Tensor:
            return self.velocity(net, x, x.new_full((x.shape[0],), level), labels)

        return slope

    def levels(self, steps: int) -> list[float]:
        """See `Objective.levels`."""
        check_steps(steps)
        return [shifted(1.0 - i / steps, self.shift) for i in range(steps + 1)]
