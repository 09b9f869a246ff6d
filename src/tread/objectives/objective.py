"""The interface of a training objective, for trainer and sampler.

- A *level* is the amount of noise in a state, in the objective's own unit (EDM: sigma, flow: t); 0 is the
  data. Training draws one per sample, as a tensor; a solver uses a fixed list shared by the batch, as Python
  floats, so that no decision about a level synchronises with the device.
- A *field* is the slope dx/dlevel of the ODE that carries noise to data. Both objectives have such
  a field, so one Euler and one Heun serve both. Guidance may work on slopes, because a slope is affine in the
  network's output and the guidance weights sum to one. A field is never evaluated at level 0.
- Randomness is always an argument: `noise` like x and `u` uniform in (0, 1), which the objective maps to its
  levels. An objective holds settings only.
- The maths is in float32 at least, also under autocast; float64 stays float64.
"""

from collections.abc import Callable
from math import inf
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tread.errors import ConfigError

Net = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x (B, C, H, W), time (B,), labels (B,) -> (B, C, H, W)."""

Field = Callable[[Tensor, float, Tensor], Tensor]
"""x (B, C, H, W), level > 0, labels (B,) -> dx/dlevel (B, C, H, W)."""

TIME_SCALE = 1000.0
"""Factor on the noise condition. Networks embed time by sinusoids with periods from 2 pi upwards, made for 0..1000;
over a range of about one, nearly all of them would be constant."""


class Objective(Protocol):
    """A training objective: settings, the loss of a network, and the field that a solver integrates."""

    default_solver: ClassVar[str]
    """A name in `tread.sampling.solvers.SOLVERS`."""
    additive_noise: ClassVar[bool]
    """Whether a state is data plus level times noise, as churn requires."""

    def level(self, u: Tensor) -> Tensor:
        """The training distribution of levels as its quantile function, (B,) -> (B,)."""
        ...

    def loss(self, net: Net, x: Tensor, labels: Tensor, *, noise: Tensor, u: Tensor) -> Tensor:
        """The training loss of each sample: x and noise (B, C, H, W), labels and u (B,) -> (B,)."""
        ...

    def field(self, net: Net) -> Field:
        """The slope a solver integrates."""
        ...

    def levels(self, steps: int) -> list[float]:
        """steps + 1 falling levels; sampling starts from the first times standard normal noise, the last is 0."""
        ...


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def per_sample(level: Tensor, x: Tensor) -> Tensor:
    """One number per sample, (B,), in a shape that broadcasts against x (B, ...) and in its dtype."""
    return level.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))  # (B,) -> (B, 1, 1, 1)


def predict(net: Net, x: Tensor, condition: Tensor, labels: Tensor) -> Tensor:
    """The network's prediction at a noise condition (B,), in the dtype of x."""
    return net(x, TIME_SCALE * condition, labels).to(x.dtype)


def mean_square(error: Tensor) -> Tensor:
    """The mean square of each sample."""
    return error.square().flatten(1).mean(1)  # (B, C, H, W) -> (B,)


def check_number(setting: str, value: object, *, above: float = -inf, at_least: float = -inf) -> None:
    """Refuse anything but a finite number within the bounds."""
    is_bool = isinstance(value, bool)  # a subclass of int
    if isinstance(value, int | float) and not is_bool and above < value < inf and value >= at_least:
        return
    bound = f" above {above:g}" if above > -inf else f" of at least {at_least:g}" if at_least > -inf else ""
    raise ConfigError(f"{setting} is {value!r}; it must be a finite number{bound}.")


def check_steps(steps: int) -> None:
    if steps < 1:
        raise ConfigError(f"steps is {steps}; sampling needs at least 1 step.")
