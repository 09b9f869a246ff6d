"""Out-of-memory errors as messages that say what to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tread.errors import OutOfMemory


@contextmanager
def out_of_memory(advice: str) -> Iterator[None]:
    """Turn an allocator's error inside into an OutOfMemory whose message ends in `advice`."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"not enough memory on {_device()}. {advice}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's or the host's allocator raised `error`."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _device() -> str:
    if not torch.cuda.is_available():
        return "this machine"
    free, total = torch.cuda.mem_get_info()
    return f"{torch.cuda.get_device_name()} ({total / 2**30:.0f} GiB, {free / 2**30:.1f} GiB free)"
