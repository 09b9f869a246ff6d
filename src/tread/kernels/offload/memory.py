"""GPU memory as `offload: auto` measures it: what is free, and what the peak so far left free."""

import os

import torch
from torch import nn

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables with the settings of torch's allocator, read at its first GPU allocation."""
MARGIN = 0.1
"""Default share of the card that stays free."""


def let_segments_grow() -> None:
    """Have torch's allocator extend its segments, so that layers that come and go do not break up a GPU's memory.

    It has no effect after the first GPU allocation. If the user set the allocator's settings, they are left alone.
    """
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def weight_bytes(model: nn.Module, device: torch.device | None = None) -> int:
    """Bytes of a model's parameters and buffers; with `device`, of those on devices of that type."""
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.nbytes for tensor in tensors if device is None or tensor.device.type == device.type)


def free_bytes(device: torch.device) -> float:
    """Bytes that torch may still allocate on a GPU; infinite on a CPU."""
    return _limit(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else float("inf")


def would_be_free(model: nn.Module, device: torch.device) -> float:
    """Bytes that would be free on a GPU without the model."""
    return free_bytes(device) + weight_bytes(model, device)


def peak_left(device: torch.device, margin: float) -> float:
    """Bytes that this process's peak left free on a GPU, less the share `margin` of the limit."""
    return (1 - margin) * _limit(device) - torch.cuda.max_memory_allocated(device)


def _limit(device: torch.device) -> float:
    """Bytes that torch may reserve on a GPU: those it has and those that are free, up to the per-process fraction."""
    free, total = torch.cuda.mem_get_info(device)
    with torch.cuda.device(device):
        share = torch.cuda.get_per_process_memory_fraction()  # it takes no device without an index
    return min(torch.cuda.memory_reserved(device) + free, share * total)
