"""Memory: the peak of a run, and errors of too little of it (an allocator's, a killed data worker) as messages that say
what to change.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tread.errors import DataError, OutOfMemory


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
    """Whether torch noticed the death itself, or the worker's end of a connection was gone first."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("DataLoader worker (pid")
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.startswith("multiprocessing.") for name in modules)


def peak_memory(device: torch.device) -> float:
    """GiB at the peak so far: allocated on a GPU, or resident in a process on a CPU. The host knows both."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**30, 3)
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30, 3)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's or the host's allocator raised `error`."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _device() -> str:
    if not torch.cuda.is_available():
        return "this machine"
    free, total = torch.cuda.mem_get_info()
    return f"{torch.cuda.get_device_name()} ({total / 2**30:.0f} GiB, {free / 2**30:.1f} GiB free)"
