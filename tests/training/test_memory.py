"""Running out of memory: an allocator's error becomes advice, anything else stays what it is."""

import multiprocessing
import os
import signal

import pytest
import torch
import torch.utils.data

from tread.errors import DataError, OutOfMemory
from tread.training.memory import lost_workers, out_of_memory


def test_an_allocator_that_fails_ends_in_advice() -> None:
    with pytest.raises(OutOfMemory, match=r"^not enough memory on .*\. Use less\.$"), out_of_memory("Use less."):
        torch.empty(2**60, dtype=torch.uint8)  # more than there is anywhere


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory("Use less."):
        torch.matmul(torch.ones(2, 3), torch.ones(2, 3))


class Killed(torch.utils.data.Dataset[int]):
    """Samples that cost their worker its life."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_killed_worker_ends_in_advice() -> None:
    said = r"^a data worker was killed, .* with a lower train\.workers if it happens again\.$"
    with pytest.raises(DataError, match=said), lost_workers("train.workers"):
        next(iter(torch.utils.data.DataLoader(Killed(), num_workers=1)))
    ours, theirs = multiprocessing.Pipe()
    theirs.close()  # a worker may die between a batch and its memory
    with pytest.raises(DataError, match=said), lost_workers("train.workers"):
        ours.recv()


@pytest.mark.parametrize("error", [RuntimeError("another"), ConnectionResetError("of a tracker")])
def test_errors_without_a_worker_pass(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), lost_workers("train.workers"):
        raise error
