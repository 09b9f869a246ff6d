"""EDM: denoising with preconditioning (Karras et al. 2022, arXiv 2206.00364).

- The level is sigma, the standard deviation of the noise added to the data.
- The loss is written for the raw network (Eq. 8): with the weight 1 / c_out^2 of Table 1 it is a plain mean
  square against a target of unit variance. The target is simplified by hand, which avoids cancellation and
  division by a small sigma.
- The field is (x - D(x; sigma)) / sigma: Eq. 1 with Eq. 3 inserted and sigma as the ODE's time.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tread.errors import ConfigError
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


@dataclass(frozen=True, kw_only=True)
class EDM:
    """The EDM objective.

    >>> EDM().levels(3)[0]
    80.0
    """

    p_mean: float = -1.2
    """Mean of ln sigma in training."""
    p_std: float = 1.2
    """Standard deviation of ln sigma in training."""
    sigma_data: float = 0.5
    """Standard deviation of the data: scale latents to it, or set it to theirs."""
    sigma_min: float = 0.002
    """The last level above 0 when sampling."""
    sigma_max: float = 80.0
    """The level sampling starts from."""
    rho: float = 7.0
    """Exponent of the sampling levels: above 1 they crowd towards sigma_min, 1 spaces them evenly."""

    default_solver: ClassVar[str] = "heun"
    additive_noise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("objective.p_mean", self.p_mean)
        for setting in ("p_std", "sigma_data", "sigma_min", "sigma_max", "rho"):
            check_number(f"objective.{setting}", getattr(self, setting), above=0)
        if self.sigma_min >= self.sigma_max:
            raise ConfigError(
                f"objective.sigma_min is {self.sigma_min} and objective.sigma_max is {self.sigma_max}; "
                "sigma_min must be the smaller one."
            )

    # Table 1, "Network and preconditioning" (derived in Appendix B.6)
    def c_skip(self, sigma: Tensor) -> Tensor:
        return self.sigma_data**2 / (sigma**2 + self.sigma_data**2)

    def c_out(self, sigma: Tensor) -> Tensor:
        return sigma * self.sigma_data / (sigma**2 + self.sigma_data**2).sqrt()

    def c_in(self, sigma: Tensor) -> Tensor:
        return 1.0 / (sigma**2 + self.sigma_data**2).sqrt()

    def c_noise(self, sigma: Tensor) -> Tensor:
        return sigma.log() / 4.0

    # Table 1, "Training": ln sigma is normal
    def level(self, u: Tensor) -> Tensor:
        """The u-quantile of sigma, (B,) -> (B,)."""
        return (self.p_mean + self.p_std * torch.special.ndtri(at_least_float32(u))).exp()

    # Eq. 7
    def denoise(self, net: Net, x: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """The denoised data D(x; sigma), (B, C, H, W); sigma (B,)."""
        x = at_least_float32(x)
        sigma = sigma.to(x.dtype)
        at = per_sample(sigma, x)  # (B, 1, 1, 1)
        return self.c_skip(at) * x + self.c_out(at) * predict(net, self.c_in(at) * x, self.c_noise(sigma), labels)

    # Eq. 8 with the weight of Table 1
    def loss(self, net: Net, x: Tensor, labels: Tensor, *, noise: Tensor, u: Tensor) -> Tensor:
        """(B,): each sample's mean over its elements of the weighted squared error."""
        x = at_least_float32(x)
        noise = noise.to(x.dtype)
        sigma = self.level(u).to(x.dtype)
        at = per_sample(sigma, x)  # (B, 1, 1, 1)
        prediction = predict(net, self.c_in(at) * (x + at * noise), self.c_noise(sigma), labels)
        # (x - c_skip * (x + sigma * noise)) / c_out, without the cancellation
        target = self.c_in(at) * (at / self.sigma_data * x - self.sigma_data * noise)
        return mean_square(prediction - target)

    # Algorithm 2, line 7 (the ODE of Eq. 1, its score from Eq. 3)
    def field(self, net: Net) -> Field:
        """See `Objective.field`."""

        def slope(x: Tensor, level: float, labels: Tensor) -> Tensor:
            sigma = x.new_full((x.shape[0],), level)  # (B,)
            return (x - self.denoise(net, x, sigma, labels)) / level

        return slope

    # Eq. 5
    def levels(self, steps: int) -> list[float]:
        """See `Objective.levels`."""
        check_steps(steps)
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        spacings = max(steps - 1, 1)  # with one step there is nothing between sigma_max and 0
        return [self.sigma_max, *((high + i / spacings * (low - high)) ** self.rho for i in range(1, steps)), 0.0]
