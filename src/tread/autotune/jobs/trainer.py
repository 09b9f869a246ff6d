"""The trainers' own loop, as the tuner measures it: `Session.step`, at a learning rate that changes no weight."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Any, Protocol

from torch import Tensor, nn

from tread.autotune.subject import Loop, Show
from tread.kernels.fast import Fast
from tread.routing.handle import Handle
from tread.training.session import Session
from tread.training.task import Task
from tread.training.trial import turned

RATES = {"prodigy": 1e-100}
"""Rates of timed steps that are not 0, at which prodigy skips most of the step: an update times this rounds to 0."""


class Probed(Task, Protocol):
    """A task whose loss can be computed at a given noise level."""

    def losses_at(self, batch: Any, u: float, kept: Tensor | None = None) -> Tensor:
        """The loss of each sample, (B,); see `Finetuning.losses_at`."""
        ...


class TrainerLoop(Loop):
    """A `subject.Loop` of `tread train` or `tread finetune`."""

    def __init__(self, task: Probed, session: Session) -> None:
        self.task, self.session = task, session

    @property
    def model(self) -> nn.Module:
        return self.task.model

    @property
    def handles(self) -> Sequence[Handle]:
        return self.task.routing

    @property
    def fast(self) -> Sequence[Fast]:
        return self.session.fast

    def step(self, batch: Any) -> Any:
        ema = self.session.ema
        before = None if ema is None else (ema.decay, ema.warmup)
        if ema is not None:  # a decay of 1: the average is updated, for its time, and stays as it is
            ema.decay, ema.warmup = 1.0, 1
        try:
            rate = RATES.get(self.session.config.optimizer.name, 0.0)
            return self.session.step(0, repeat(batch), rate=rate)
        finally:
            if ema is not None and before is not None:
                ema.decay, ema.warmup = before

    def losses_at(self, batch: Any, u: float, kept: Tensor | None = None) -> Tensor:
        return self.task.losses_at(batch, u, kept)

    def evaluating(self) -> AbstractContextManager[None]:
        return self.session.averaged()

    def start(self, steps: int, show: Show) -> None:
        """See `Opened.start`."""
        self.session.optimizer = self.session.new_optimizer()  # the timed steps have changed the state of this one
        self.model.train()
        batches = self.task.batches(0)
        with turned(self.handles, "dense"):
            for step in show(range(min(steps, self.session.config.train.steps))):
                self.session.step(step, batches)

    def close(self) -> None:
        """Remove compiled layers and CUDA graphs."""
        for fast in self.fast:
            fast.remove()
