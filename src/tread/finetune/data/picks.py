"""`PickSampler`: the samples and captions of each micro-step.

Caption dropout, the choice among several captions (or variants of one) and mirroring are hashes of the seed and of the
sample's global position in the run, which differs for every visit in every epoch. So a checkpoint saves no sampler
state, and a run does not depend on the number of processes.
"""

from typing import NamedTuple

from torch import Tensor

from tread.data.captioned.buckets import BucketOrder
from tread.data.order import MicroSteps
from tread.errors import ConfigError
from tread.routing import noise

_DROP_WORD, _CAPTION_WORD, _FLIP_WORD = (int.from_bytes(word) for word in (b"drop", b"capt", b"flip"))


class Pick(NamedTuple):
    """One visit to a sample, with the choice of its caption."""

    sample: int
    dropped: bool = False
    """Whether the empty caption replaces the sample's own."""
    caption: int = 0
    """Index of the caption, modulo the number of the sample's captions."""
    position: int = 0
    """The global position of this visit in the run, which seeds its noise."""
    mirrored: bool = False
    """Whether the mirrored sample is taken, if it has one."""


class PickSampler(MicroSteps[Pick]):
    """The picks of one rank, one list per micro-step; compare `order.StepSampler`."""

    def __init__(self, order: BucketOrder, *, caption_dropout: float, seed: int, **slices: int) -> None:
        batch, micro_steps = slices["batch"], slices["micro_steps"]
        if order.size * micro_steps != batch:
            raise ConfigError(
                f"the order gives {order.size} samples per micro-step; with {micro_steps} micro-steps the batch is "
                f"{order.size * micro_steps}, not {batch}."
            )
        super().__init__(**slices)
        self.order, self.caption_dropout, self.seed = order, caption_dropout, seed

    def items(self, index: int, positions: Tensor) -> list[Pick]:
        samples = self.order.batch(index)[positions - index * self.order.size]  # (B,)
        dropped = noise.uniform(self.seed, _DROP_WORD, positions) < self.caption_dropout  # (B,)
        captions = noise.bits(self.seed, _CAPTION_WORD, positions)  # (B,)
        mirrored = noise.uniform(self.seed, _FLIP_WORD, positions) < 0.5  # (B,)
        drawn = (samples, dropped, captions, positions, mirrored)
        return list(map(Pick, *(values.tolist() for values in drawn)))
