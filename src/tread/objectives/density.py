"""Densities of training times: uniform, logit-normal, mode and beta, each as its quantile function and its CDF.

- A time is the quantile function at u in (0, 1), so the caller decides how times are spread by its choice of u: hashes
  for training, even steps for validation, an interval for an expert that is trained on some times only.
- Time 1 is noise. `mode` and `logit-normal` are those of Esser et al. 2024 (arXiv 2403.03206, section 3.1).
- torch has no incomplete beta function: the CDF of `beta` is a table, integrated once in float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from tread.errors import ConfigError

DensityName = Literal["logit-normal", "uniform", "mode", "beta"]
HIGHEST_MODE = 2 / (math.pi - 2)
"""The largest `mode_scale` for which times grow with u (Esser et al., section 3.1); the smallest is -1."""
LEAST_BETA = 0.5
"""The smallest shape of a beta density: below it, more than half of the times lie within the last ten-thousandth."""
_CELLS = 1 << 16
"""Cells of the table of a beta density."""
PARAMETERS: dict[str, DensityName] = {
    "logit_mean": "logit-normal",
    "logit_std": "logit-normal",
    "mode_scale": "mode",
    "beta_alpha": "beta",
    "beta_beta": "beta",
}
"""Parameter -> the density that it belongs to."""


@dataclass(frozen=True, kw_only=True)
class Density:
    """The density of training times in (0, 1).

    >>> Density(name="mode", mode_scale=0.0).quantile(torch.tensor(0.25))
    tensor(0.2500)
    """

    name: DensityName = "uniform"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    beta_alpha: float = 2.0
    beta_beta: float = 2.0

    def __post_init__(self) -> None:
        for name, own in PARAMETERS.items():
            value, default = getattr(self, name), getattr(Density, name)
            if not math.isfinite(value):
                raise ConfigError(f"{name} is {value}; it must be a number.")
            if value != default and own != self.name:
                raise ConfigError(
                    f"{name} is {value}, but time_density is {self.name!r}, which does not use it: set time_density to "
                    f"{own!r}, or leave {name} out."
                )
        if self.logit_std <= 0:
            raise ConfigError(f"logit_std is {self.logit_std}; it must be above 0.")
        if not -1 <= self.mode_scale <= HIGHEST_MODE:
            raise ConfigError(f"mode_scale is {self.mode_scale}; allowed is -1 <= value <= {HIGHEST_MODE:.4f}.")
        for name in ("beta_alpha", "beta_beta"):
            if getattr(self, name) < LEAST_BETA:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {LEAST_BETA}.")

    def quantile(self, u: Tensor) -> Tensor:
        """The u-quantile of the times, in the shape of u."""
        if self.name == "logit-normal":
            return logit_normal(u, self.logit_mean, self.logit_std)
        if self.name == "mode":
            return _mode(u, self.mode_scale)
        if self.name == "beta":
            below = _beta_table(self.beta_alpha, self.beta_beta, u.device).to(u.dtype)  # (cells + 1,)
            cell = torch.searchsorted(below, u.contiguous()).clamp(1, _CELLS) - 1
            inside = (u - below[cell]) / (below[cell + 1] - below[cell]).clamp(min=torch.finfo(u.dtype).tiny)
            return torch.sin((cell + inside) * (math.pi / 2 / _CELLS)).square()
        return u

    def cdf(self, time: float) -> float:
        """The share of the times below `time`: the inverse of `quantile`."""
        if self.name == "logit-normal":
            logit = torch.logit(torch.tensor(time, dtype=torch.float64))
            return float(torch.special.ndtr((logit - self.logit_mean) / self.logit_std))
        if self.name == "mode":
            return _inverted(lambda u: float(_mode(torch.tensor(u, dtype=torch.float64), self.mode_scale)), time)
        if self.name == "beta":
            below = _beta_table(self.beta_alpha, self.beta_beta, torch.device("cpu"))
            at = math.asin(math.sqrt(time)) / (math.pi / 2) * _CELLS
            cell = min(int(at), _CELLS - 1)
            return float(below[cell] + (at - cell) * (below[cell + 1] - below[cell]))
        return time


# Esser et al. Eq. 19
def logit_normal(u: Tensor, mean: float, std: float) -> Tensor:
    """The u-quantile of a time whose logit is normal."""
    return torch.sigmoid(mean + std * torch.special.ndtri(u))


# Esser et al. Eq. 20 at 1 - u, which makes it grow with u
def _mode(u: Tensor, scale: float) -> Tensor:
    return u - scale * (torch.sin(0.5 * math.pi * u).square() - u)


@cache
def _beta_table(alpha: float, beta: float, device: torch.device) -> Tensor:
    """The CDF of a beta density at times sin(a)^2, where a goes from 0 to pi/2 in equal cells; (cells + 1,) float64.

    The substitution keeps the integrand bounded at both ends; a copy on each device, because copying synchronises.
    """
    if device.type != "cpu":
        return _beta_table(alpha, beta, torch.device("cpu")).to(device)
    middle = (torch.arange(_CELLS, dtype=torch.float64) + 0.5) * (math.pi / 2 / _CELLS)
    mass = torch.sin(middle) ** (2 * alpha - 1) * torch.cos(middle) ** (2 * beta - 1)  # (cells,)
    below = torch.cat([mass.new_zeros(1), mass.cumsum(0)])
    return below / below[-1]


def _inverted(rising: Callable[[float], float], value: float) -> float:
    """The argument at which a function that rises from 0 at 0 to 1 at 1 takes `value`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return 0.5 * (low + high)
