"""A killed data worker is noticed where a batch is fetched, not in the middle of whatever the main thread does.

A worker that is killed while it reports something leaves the progress bars of the main process usable.
"""

import multiprocessing
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tqdm import tqdm

from tread.data.workers import fetched


class Deadly:
    """A stderr that kills whoever writes to it."""

    def write(self, _: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Reporting(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        tqdm.write("cannot be read", file=Deadly())
        return index


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


def test_a_worker_killed_while_it_reports_takes_no_lock_along(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = multiprocessing.RLock()  # the part of tqdm's own lock that forked processes share
    monkeypatch.setattr(tqdm, "_lock", shared, raising=False)
    with pytest.raises((RuntimeError, ConnectionError, EOFError)):
        list(fetched(DataLoader(Reporting(), num_workers=1)))
    assert shared.acquire(timeout=5)
