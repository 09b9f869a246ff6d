"""A task: the interface between a job and the training loop, which knows nothing else of the job."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from tread.kernels.fast import Fast
from tread.routing.handle import Handle

Review = Callable[[], dict[str, float]]
"""Validates, draws or evaluates the averaged model on every rank; returns the figures to log, on rank 0 at least."""


class Task(Protocol):
    """A model to train, its batches and their loss."""

    facts: dict[str, Any]
    """Facts about the model and its training, such as its routes, for the checkpoint's manifest; JSON."""
    unit: str
    """The progress bar's word for a sample: `img` or `clip`."""

    @property
    def model(self) -> nn.Module:
        """The network; parameters that require gradients are trained."""
        ...

    @property
    def routing(self) -> Sequence[Handle]:
        """The routing of the network, that of the last forward first; empty if it is dense."""
        ...

    def summary(self) -> str:
        """One line: what is trained, on what, with which routes."""
        ...

    def make_fast(self) -> Sequence[Fast]:
        """Put compiled layers, CUDA graphs and kernels on the model as the settings say, parameter names unchanged."""
        ...

    def batches(self, start_step: int) -> Iterator[Any]:
        """This rank's micro-batches from `start_step` on, on the device; each carries its sample positions."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of one micro-batch; `model` may be a wrapper of the task's own."""
        ...

    def reviews(self, step: int) -> Mapping[str, Review]:
        """The reviews due after `step` steps (0: before the first one), by the words that the progress bar shows
        meanwhile. The loop runs them with the averaged weights, all tokens in all layers."""
        ...

    def saved(self, checkpoint: Path) -> None:
        """Write the result of a checkpoint, which other programs load, unless it is there.

        Called on rank 0 after every save and every resume, with the checkpoint's averaged weights in place. Of a
        sharded model, whose weights no process has whole, it is called after a resume alone.
        """


def is_due(every: int, step: int, steps: int) -> bool:
    """Whether something due every `every` steps (0: never) and after the last one is due after `step` steps.

    Nothing is due before the first step.
    """
    return every > 0 < step and (step % every == 0 or step == steps)
