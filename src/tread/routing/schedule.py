"""The schedule: how the ratio of every route changes over training.

- Warm-up: the ratio climbs from dense to its full value over the first steps, which avoids the loss spike of an
  adapter that suddenly misses tokens.
- Cool-down: the last fraction of the steps runs dense, which recovers quality.
- The ratio takes at most `levels` intermediate values, so that compiled code sees few shapes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tread.errors import ConfigError, check_fraction, check_int, check_keys, shown


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`scale(step)` multiplies every route's ratio: 0 is dense, 1 the ratio as configured."""

    warmup_steps: int = 0
    """Optimizer steps over which the scale climbs from 0 to 1."""
    cooldown_fraction: float = 0.0
    """Fraction of `total_steps`, at the end, with scale 0."""
    levels: int = 4
    """Steps of the staircase that the warm-up climbs."""
    total_steps: int | None = None
    """Optimizer steps of the run; needed for a cool-down."""

    def __post_init__(self) -> None:
        check_int(self.warmup_steps, "schedule.warmup_steps", 0)
        check_fraction(self.cooldown_fraction, "schedule.cooldown_fraction")
        check_int(self.levels, "schedule.levels", 1)
        if self.total_steps is not None:
            check_int(self.total_steps, "schedule.total_steps", 1)

    @classmethod
    def from_config(cls, config: object) -> "Schedule":
        """A schedule from its mapping."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"schedule is {shown(config)}; it must be a mapping, e.g. {{'warmup_steps': 500}}.")
        check_keys(config, cls.__dataclass_fields__, "schedule")
        return cls(**config)

    def to_config(self) -> dict[str, float | int | None]:
        """The config form; `Schedule.from_config` reads it back."""
        return asdict(self)

    def scale(self, step: int) -> float:
        """The factor at optimizer step `step`, counted from 0.

        >>> [Schedule(warmup_steps=4, levels=2).scale(step) for step in range(5)]
        [0.0, 0.0, 0.5, 0.5, 1.0]
        """
        if self.cooldown_fraction:
            if self.total_steps is None:
                raise ConfigError(
                    "schedule.cooldown_fraction needs schedule.total_steps (the trainers fill it in; "
                    "in a loop of your own, set it to the number of optimizer steps)."
                )
            if step >= self.total_steps - round(self.total_steps * self.cooldown_fraction):
                return 0.0
        if step >= self.warmup_steps:
            return 1.0
        return (step * self.levels // self.warmup_steps) / self.levels
