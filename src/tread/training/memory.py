"""Memory of a process: its peaks, and errors that say what to change when it runs out (an allocator's error, a killed
data worker).
"""

import ctypes
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tread.errors import DataError, OutOfMemory

STATUS = Path("/proc/self/status")
PERIOD = 0.002
"""Seconds between two readings of the anonymous memory."""


@contextmanager
def out_of_memory(advice: str) -> Iterator[None]:
    """Turn an allocator's error inside into an OutOfMemory whose message ends in `advice`."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"not enough memory on {_device()}. {advice}") from error


@contextmanager
def lost_workers(setting: str) -> Iterator[None]:
    """Turn the death of a data worker inside into a DataError; `setting` is the number of workers."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        if not _is_lost_worker(error):
            raise
        raise DataError(
            "a data worker was killed, as the system does when memory runs out: give the same command again to go on, "
            f"with a lower {setting} if it happens again."
        ) from error


def _is_lost_worker(error: Exception) -> bool:
    """Whether torch reports a dead worker, or the connection to one was closed first."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("DataLoader worker (pid")
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.startswith("multiprocessing.") for name in modules)


def peak_memory(device: torch.device) -> float:
    """GiB at the peak so far: allocated on a GPU, or resident memory of a CPU process. Neither synchronises."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)


def give_back() -> None:
    """Return freed memory to the system; glibc would keep it between blocks that are in use."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have none
        if trim is not None:
            trim(0)


class AnonymousPeak:
    """The increase of this process's anonymous memory (RssAnon), at its peak, inside a `with`.

    Anonymous memory is allocated memory, without the pages of mapped files, which the system may drop. The system
    records no peak of it, so a thread reads it every few milliseconds.
    """

    def __init__(self) -> None:
        self.bytes: int | None = None
        """None while the context is open, and on systems other than Linux."""
        self._before = self._most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="anonymous memory", daemon=True)

    def __enter__(self) -> "AnonymousPeak":
        if STATUS.is_file():
            self._before = self._most = _anonymous()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if STATUS.is_file():
            self._done.set()
            self._thread.join()
            self.bytes = max(self._most, _anonymous()) - self._before

    def _watch(self) -> None:
        while not self._done.wait(PERIOD):
            self._most = max(self._most, _anonymous())


def _anonymous() -> int:
    """Bytes of anonymous memory that this process has now."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 2**10


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's or the host's allocator raised `error`."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _device() -> str:
    if not torch.cuda.is_available():
        return "this machine"
    free, total = torch.cuda.mem_get_info()
    return f"{torch.cuda.get_device_name()} ({total / 2**30:.0f} GiB, {free / 2**30:.1f} GiB free)"
