"""DataLoader batches from workers that may be killed: the error comes where a batch is fetched, and no lock is lost."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from tqdm import tqdm


def fetched(loader: DataLoader[Any]) -> Iterator[Any]:
    """Iterate over a loader's batches with torch's SIGCHLD handler removed and tqdm's lock not shared with its workers.

    The handler raises wherever the main thread happens to be, such as in the middle of a save or of another error's
    report. It is not needed: a loader that waits for a batch polls its workers every five seconds.
    """
    loader.worker_init_fn = own_bars
    batches = iter(loader)  # installs the handler
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGCHLD)
        if getattr(handler, "__module__", None) == signal_handling.__name__:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield from batches


def own_bars(_: int = 0) -> None:
    """Give the progress bars of a forked process a lock of its own; a `worker_init_fn`.

    By default it shares a semaphore with its parent. Killed in `tqdm.write`, it would never release it, and the
    parent's next bar would wait forever.
    """
    lock, classes = threading.RLock(), [tqdm]
    for bar in classes:  # a subclass that was used before its base has its own attribute
        bar.set_lock(lock)
        classes += bar.__subclasses__()
