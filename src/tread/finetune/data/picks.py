"""`PickSampler`: the samples and captions of each micro-step.

Whether a caption is dropped, and which of several captions is taken, is a hash of the seed and of the sample's global
position in the run. So a checkpoint saves no sampler state, and any number of processes sees the same run.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch.utils.data import Sampler

from tread.data.captioned.buckets import BucketOrder
from tread.data.order import positions
from tread.errors import ConfigError
from tread.routing import noise

_DROP_WORD, _CAPTION_WORD = (int.from_bytes(word) for word in (b"drop", b"capt"))


class Pick(NamedTuple):
    """One visit to a sample, with the choice of its caption."""

    sample: int
    dropped: bool = False
    """Whether the empty caption replaces the sample's own."""
    caption: int = 0
    """Index of the caption, modulo the number of the sample's captions."""
    position: int = 0
    """The sample's global position in the run, which its noise is a function of."""


class PickSampler(Sampler[list[Pick]]):
    """A DataLoader's `batch_sampler`: the picks of one rank, one list per micro-step; compare `order.StepSampler`."""

    def __init__(
        self,
        order: BucketOrder,
        *,
        batch: int,
        micro_steps: int,
        rank: int,
        world: int,
        start_step: int,
        steps: int,
        caption_dropout: float,
        seed: int,
    ) -> None:
        if order.size * micro_steps != batch:
            raise ConfigError(
                f"the order gives {order.size} samples per micro-step; with {micro_steps} micro-steps the batch is "
                f"{order.size * micro_steps}, not {batch}."
            )
        self.order, self.caption_dropout, self.seed = order, caption_dropout, seed
        self.start_step, self.steps, self.micro_steps = start_step, steps, micro_steps
        self._slices = {"batch": batch, "micro_steps": micro_steps, "rank": rank, "world": world}

    def __len__(self) -> int:
        return max(0, self.steps - self.start_step) * self.micro_steps

    def __iter__(self) -> Iterator[list[Pick]]:
        for step in range(self.start_step, self.steps):
            for micro_step in range(self.micro_steps):
                where = positions(step, micro_step, **self._slices)  # (B,)
                index = step * self.micro_steps + micro_step
                samples = self.order.batch(index)[where - index * self.order.size]  # (B,)
                dropped = noise.uniform(self.seed, _DROP_WORD, where) < self.caption_dropout  # (B,)
                captions = noise.bits(self.seed, _CAPTION_WORD, where)  # (B,)
                yield list(map(Pick, samples.tolist(), dropped.tolist(), captions.tolist(), where.tolist()))
