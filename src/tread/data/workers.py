"""Batches of a DataLoader whose killed workers are noticed where a batch is fetched, and nowhere else."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling


def fetched(loader: DataLoader[Any]) -> Iterator[Any]:
    """The loader's batches, without torch's handler of SIGCHLD.

    That handler raises wherever the main thread is, such as in the middle of a save or of another error's report. A
    loader that waits for a batch looks after its workers by itself, every five seconds.
    """
    batches = iter(loader)  # installs the handler
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGCHLD)
        if getattr(handler, "__module__", None) == signal_handling.__name__:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield from batches
