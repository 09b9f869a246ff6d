"""The learning rate as a function of the step: `constant`, `linear`, `cosine`, `polynomial`, `cosine_with_restarts`.

Each falls from the configured rate to `end_rate` over the whole run, while the warm-up multiplies its first steps. A
rate depends on the step alone, so that a resumed run has the rates of an uninterrupted one.
"""

import math

from tread.training.settings import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate at optimizer step `step`, counted from 0, of a run of `steps`."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    share = _share(config, step, steps)
    return warmup * (config.learning_rate * share + config.end_rate * (1 - share))


def _share(config: OptimizerConfig, step: int, steps: int) -> float:
    """The share of the way from `end_rate` up to `learning_rate`."""
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - step / steps
        case "polynomial":
            return (1 - step / steps) ** config.power
        case "cosine" | "cosine_with_restarts":  # cosine has one cycle
            return 0.5 * (1 + math.cos(math.pi * (config.cycles * step % steps) / steps))
