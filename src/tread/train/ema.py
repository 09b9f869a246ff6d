"""An exponential moving average of the weights, with a warm-up.

A fixed decay of 0.9999 remembers its random start for tens of thousands of updates; with the warm-up the average
covers a constant share of the run so far until the decay is reached. The average is a copy of the synchronised
model and each update depends on nothing but the weights and the step, so it is identical on every rank.
"""

import copy

import torch
from torch import nn


class EMA:
    """`ema.model` is a frozen copy in eval mode that follows `model`; make it after the ranks are in step."""

    def __init__(self, model: nn.Module, *, decay: float, warmup: int) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self.warmup = warmup

    def decay_at(self, step: int) -> float:
        """The decay of the update after optimizer step `step`, counted from 0."""
        return min(self.decay, (1 + step) / (self.warmup + step))

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Move towards `model` after optimizer step `step`."""
        weight = 1 - self.decay_at(step)
        lerp = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]  (one kernel for all parameters)
        lerp(list(self.model.parameters()), list(model.parameters()), weight)
        for average, current in zip(self.model.buffers(), model.buffers(), strict=True):
            average.copy_(current)
