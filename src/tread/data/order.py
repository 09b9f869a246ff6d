"""The order of the data as a pure function of the step.

- Sample positions count 0, 1, 2, ... over the whole run. Step s takes positions s * batch ..
  (s + 1) * batch - 1; the position decides the sample, and with the seed everything random about it.
  Nothing is saved: a run resumed at step k uses the positions of step k.
- Every epoch has its own permutation, the stable sort of hashed indices, from the stateless noise of
  `routing.noise`. A batch may span two epochs; nothing is dropped at the end of one.
- Shards that do not all fit in the cache are read in windows: every epoch shuffles the shards, takes `window` of them
  at a time and shuffles their samples. The result is still a permutation of the epoch; nothing else changes.
- Micro-steps and ranks take contiguous slices of the step, so that the union over any number of
  processes is the single-process batch, in order. The sampler already takes the rank's slice: its loader
  must not be split again by accelerate.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Sampler

from tread.errors import ConfigError
from tread.routing import noise
from tread.words import counted

_ORDER_WORD = int.from_bytes(b"orde")
_SPLIT_WORD = int.from_bytes(b"spli")
_GROUP_WORD = int.from_bytes(b"grou")
Item = TypeVar("Item")


class Groups(NamedTuple):
    """Samples that are stored together, such as those of a shard; `window` groups are read at a time."""

    of_sample: Tensor
    """The group of each sample, (N,) int64."""
    window: int

    def at(self, indices: Tensor) -> "Groups":
        """The groups of a subset of the samples."""
        return Groups(self.of_sample[indices], self.window)

    def ranks(self, *words: int) -> Tensor:
        """The rank of each group in a permutation seeded by `words`, (G,)."""
        return noise.permutation(int(self.of_sample.max()) + 1, *words).argsort()


class Order:
    """Maps global sample positions to indices of a dataset of n samples.

    >>> order = Order(4, seed=0)
    >>> sorted(order.indices(torch.arange(4, 8)).tolist())
    [0, 1, 2, 3]
    """

    def __init__(self, n: int, seed: int, groups: Groups | None = None) -> None:
        if n < 1:
            raise ConfigError(f"the order needs at least 1 sample to train on, there are {n}")
        self.n, self.seed, self.groups = n, seed, groups
        self._epochs: dict[int, Tensor] = {}

    def indices(self, positions: Tensor) -> Tensor:
        """(B,) positions -> (B,) dataset indices, both int64."""
        out = torch.empty_like(positions)
        epochs = positions // self.n
        for epoch in epochs.unique().tolist():
            in_epoch = epochs == epoch
            out[in_epoch] = self._epoch(epoch)[positions[in_epoch] % self.n]
        return out

    def _epoch(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # two are enough for batches that cross an epoch's end
                self._epochs.pop(next(iter(self._epochs)))
            shuffled = noise.permutation(self.n, self.seed, _ORDER_WORD, epoch)
            if self.groups is not None:
                windows = self._windows(epoch)[self.groups.of_sample[shuffled]]
                shuffled = shuffled[torch.argsort(windows, stable=True)]
            self._epochs[epoch] = shuffled
        return self._epochs[epoch]

    def _windows(self, epoch: int) -> Tensor:
        """The window of each group in an epoch, (G,)."""
        assert self.groups is not None
        return self.groups.ranks(self.seed, _GROUP_WORD, epoch) // self.groups.window

    def following(self, position: int) -> list[int]:
        """The groups of the window after the one that holds `position`; empty without groups."""
        if self.groups is None:
            return []
        epoch, offset = divmod(position, self.n)
        windows = self._windows(epoch)
        window = int(windows[self.groups.of_sample[self._epoch(epoch)[offset]]]) + 1
        if window > int(windows.max()):
            windows, window = self._windows(epoch + 1), 0
        return torch.nonzero(windows == window).flatten().tolist()


class Visit(NamedTuple):
    """One visit of a sample: its index in the dataset, and its position in the run."""

    sample: int
    position: int


class Visited(torch.utils.data.Dataset[tuple[Tensor, int, int]]):
    """A dataset indexed by visits: `visited[sample, position]` is the sample, its label and the position."""

    def __init__(self, dataset: torch.utils.data.Dataset[tuple[Tensor, int]]) -> None:
        self.dataset = dataset

    def __getitem__(self, visit: Visit) -> tuple[Tensor, int, int]:
        sample, position = visit
        return *self.dataset[sample], position


class MicroSteps(Sampler[list[Item]]):
    """A DataLoader's `batch_sampler`: one list of items per micro-step, for one rank; subclasses define `items`.

    `steps` is the total of the run, not the number left: a run resumed at step k passes `start_step=k` and
    gets the rest of the uninterrupted run's batches.
    """

    def __init__(self, *, batch: int, micro_steps: int, rank: int, world: int, start_step: int, steps: int) -> None:
        _slice_size(batch, micro_steps, world)
        self.start_step, self.steps, self.micro_steps = start_step, steps, micro_steps
        self._slices = {"batch": batch, "micro_steps": micro_steps, "rank": rank, "world": world}

    def __len__(self) -> int:
        return max(0, self.steps - self.start_step) * self.micro_steps

    def __iter__(self) -> Iterator[list[Item]]:
        for index in range(self.start_step * self.micro_steps, self.steps * self.micro_steps):
            yield self.items(index, positions(*divmod(index, self.micro_steps), **self._slices))

    def items(self, index: int, positions: Tensor) -> list[Item]:
        """The items of micro-step `index`, counted over the run, at these global sample positions (B,)."""
        raise NotImplementedError


class StepSampler(MicroSteps[Visit]):
    """The visits of `order`; `coming` is called with the next window's groups whenever a window begins."""

    def __init__(self, order: Order, coming: Callable[[list[int]], None] | None = None, **slices: int) -> None:
        super().__init__(**slices)
        self.order, self._coming = order, coming
        self._told: list[int] = []

    def items(self, index: int, positions: Tensor) -> list[Visit]:
        if self._coming is not None and (groups := self.order.following(int(positions[-1]))) != self._told:
            self._told = groups
            self._coming(groups)
        return list(map(Visit, self.order.indices(positions).tolist(), positions.tolist()))


def positions(step: int, micro_step: int, *, batch: int, micro_steps: int, rank: int, world: int) -> Tensor:
    """The global sample positions of one micro-step on one rank, (batch / micro_steps / world,) int64.

    >>> positions(3, 1, batch=8, micro_steps=2, rank=0, world=2)
    tensor([28, 29])
    """
    size = _slice_size(batch, micro_steps, world)
    first = step * batch + (micro_step * world + rank) * size
    return torch.arange(first, first + size)


def split(n: int, held_out: int, seed: int, groups: Groups | None = None) -> tuple[Tensor, Tensor]:
    """A seeded choice of `held_out` of n samples: (train indices, validation indices), each ascending.

    With groups, the held-out samples come from as few groups as possible, so that validation reads few shards.
    """
    if not 0 <= held_out < n:
        raise ConfigError(
            f"cannot hold out {held_out} of {n} samples for validation; allowed is 0..{n - 1}, "
            "which leaves at least one to train on"
        )
    shuffled = noise.permutation(n, seed, _SPLIT_WORD)
    if groups is not None:
        shuffled = shuffled[torch.argsort(groups.ranks(seed, _SPLIT_WORD)[groups.of_sample[shuffled]], stable=True)]
    return shuffled[held_out:].sort().values, shuffled[:held_out].sort().values


def _slice_size(batch: int, micro_steps: int, world: int) -> int:
    parts = micro_steps * world
    if batch < 1 or batch % parts:
        raise ConfigError(
            f"train.batch_size is {batch}; it must be a multiple of {parts}, that is {counted(world, 'process')} "
            f"times {counted(micro_steps, 'accumulation micro-step')}"
        )
    return batch // parts
