"""DataLoader batches without torch's SIGCHLD handler: a killed worker raises where a batch is fetched."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling


def fetched(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate over a loader's batches with torch's SIGCHLD handler removed.

    The handler raises wherever the main thread happens to be, such as in the middle of a save or of another error's
    report. It is not needed: a loader that waits for a batch polls its workers every five seconds.
    """
    batches = iter(loader)  # installs the handler
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGCHLD)
        if getattr(handler, "__module__", None) == signal_handling.__name__:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield from batches
