"""A killed data worker is noticed where a batch is fetched, not in the middle of whatever the main thread does."""

import multiprocessing
import os

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tread.data.workers import fetched


def test_work_beside_a_killed_worker_goes_on() -> None:
    loader = DataLoader(TensorDataset(torch.arange(9)), num_workers=1, prefetch_factor=1)
    batches = fetched(loader)
    assert next(batches)[0] == 0
    (worker,) = multiprocessing.active_children()
    worker.kill()
    os.waitid(os.P_PID, worker.pid or 0, os.WEXITED | os.WNOWAIT)  # SIGCHLD has come, and torch can still ask for it
    assert sum(range(1000)) == 499500
    with pytest.raises((RuntimeError, ConnectionError, EOFError)):
        list(batches)
