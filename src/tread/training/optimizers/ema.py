"""EMA: an exponential moving average of the weights, with a warm-up for short runs.

With a fixed decay of 0.9999 the random initial weights persist for tens of thousands of updates; with the warm-up the
average covers a constant share of the run so far until the decay is reached. Only trainable parameters are averaged, so
an adapter on a large frozen model costs little. An update depends only on the weights and the step, so it is identical
on every rank; the average of sharded weights is sharded like them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class EMA:
    """Averages of `model`'s trainable parameters, by name; create it after the ranks are synchronised."""

    def __init__(self, model: nn.Module, *, decay: float, warmup: int) -> None:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.averages: dict[str, Tensor] = {name: parameter.detach().clone() for name, parameter in trained.items()}
        self.decay, self.warmup = decay, warmup
        self._parameters: list[Tensor] = list(trained.values())

    def decay_at(self, step: int) -> float:
        """The decay of the update after optimizer step `step`, counted from 0."""
        return min(self.decay, (1 + step) / (self.warmup + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the weights after optimizer step `step`."""
        lerp = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]  (one kernel for all parameters)
        lerp(list(self.averages.values()), self._parameters, 1 - self.decay_at(step))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; storage is swapped, not copied, unless it is sharded."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in zip(self._parameters, self.averages.values(), strict=True):
            if isinstance(parameter, DTensor) and isinstance(average, DTensor):  # FSDP2 gathers from its own storage
                shard, other = parameter.to_local(), average.to_local()
                held = shard.clone()
                shard.copy_(other)
                other.copy_(held)
            else:
                parameter.data, average.data = average.data, parameter.data
