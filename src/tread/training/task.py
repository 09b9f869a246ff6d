"""A task: what a job brings to the training loop, which knows nothing else of it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from tread.kernels.compiling import Attempt
from tread.routing.handle import Handle


class Task(Protocol):
    """What is trained."""

    facts: dict[str, Any]
    """What a checkpoint must say about the model and its training for others to use it, its routes among them; JSON."""
    steps_setting: str
    """The name of the setting that says how long to train."""
    attention_setting: str
    """The name of the setting that chooses attention's kernel."""
    memory_advice: str
    """What to change when memory runs out."""
    divergence_advice: str
    """What to change when the loss is no longer a number."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def routing(self) -> Sequence[Handle]:
        """The handles of the model; none where it is dense."""
        ...

    @property
    def kept_share(self) -> float:
        """The share of tokens that the routed layers of the last forward kept."""
        ...

    def summary(self) -> str:
        """One line: what is trained, on what, with which routes."""
        ...

    def compile(self) -> Attempt:
        """Compile the model in place, parameter names unchanged."""
        ...

    def set_step(self, step: int) -> None:
        """Called before each optimizer step."""
        ...

    def batches(self, start_step: int) -> Iterator[Any]:
        """This rank's micro-batches from `start_step` on, on the device."""
        ...

    def loss(self, model: nn.Module, batch: Any, step: int, micro_step: int) -> Tensor:
        """The mean loss of one micro-batch; `model` may be a wrapper of the task's own."""
        ...

    def validate(self) -> dict[str, float]:
        """Figures of the averaged model, all tokens in all layers; called on every rank."""
        ...

    def preview(self, step: int) -> None:
        """Draw samples of the averaged model; called on every rank."""
        ...

    def evaluate(self, step: int) -> dict[str, float]:
        """Figures of the averaged model's samples; called on every rank, rank 0 has them."""
        ...

    def saved(self, checkpoint: Path) -> None:
        """Make what others load of a checkpoint, unless it is there.

        Called on rank 0 after every save and every resume, with the checkpoint's averaged weights in place.
        """
        ...

    def resume_command(self, folder: Path) -> str:
        """What a user types to go on with a stopped run."""
        ...
