"""The learning rate as a function of the step: `constant`, `linear`, `cosine`, `polynomial`, `cosine_with_restarts`.

Each climbs linearly to the configured rate over the warm-up, then falls to `end_rate` over the remaining steps. A rate
depends on the step alone, so that a resumed run has the rates of an uninterrupted one.
"""

import math

from tread.training.settings import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate at optimizer step `step`, counted from 0, of a run of `steps`."""
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / warmup * config.learning_rate
    share = _share(config, step - warmup, steps - warmup)
    return config.learning_rate * share + config.end_rate * (1 - share)


def _share(config: OptimizerConfig, step: int, steps: int) -> float:
    """The share of the way from `end_rate` up to `learning_rate`, at a step after the warm-up."""
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - step / steps
        case "polynomial":
            return (1 - step / steps) ** config.power
        case "cosine" | "cosine_with_restarts":  # cosine has one cycle
            return 0.5 * (1 + math.cos(math.pi * (config.cycles * step % steps) / steps))
