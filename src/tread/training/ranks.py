"""What the processes of a run agree on: what rank 0 found, and the largest number that any of them has."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, distributed

from tread.errors import CheckpointError

Found = TypeVar("Found")


def found_by_main(accelerator: Accelerator, find: Callable[[], Found]) -> Found:
    """What `find` returns on rank 0, or the CheckpointError that it raises there, on every rank."""
    outcome: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            outcome = [find()]
        except CheckpointError as error:
            outcome = [error]
    (found,) = broadcast_object_list(outcome)
    if isinstance(found, CheckpointError):
        raise found
    return found


class Largest:
    """The largest of the processes' numbers, one exchange behind: a step never waits for the network.

    Each call gives this process's number to an exchange that runs in the background, over gloo, and returns the result
    of the call before, which is the same on every process.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._alone = accelerator.num_processes == 1
        self._group = None if self._alone else distributed.new_group(backend="gloo")
        self._sent: Tensor | None = None
        self._work: Any = None

    def __call__(self, number: int) -> int:
        if self._alone:
            return number
        result = self.settle()
        self._sent = torch.tensor([number])
        self._work = distributed.all_reduce(self._sent, distributed.ReduceOp.MAX, self._group, async_op=True)
        return result

    def settle(self) -> int:
        """The result of the exchange that is still out; 0 if there is none."""
        if self._work is None or self._sent is None:
            return 0
        self._work.wait()
        result = int(self._sent)
        self._work = self._sent = None
        return result
