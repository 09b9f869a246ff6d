"""Memory of a GPU, as `offload: auto` needs to know it: what is free, and what the fullest moment so far left."""

import os

import torch
from torch import nn

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variables from which torch reads the settings of its allocator, when it first takes memory of a GPU."""
MARGIN = 0.1
"""Share of the card that stays free unless another is asked for."""


def let_segments_grow() -> None:
    """Have torch's allocator extend its segments, so that layers that come and go do not break up a GPU's memory.

    It is too late where the GPU was used before. Settings of the user's own are left alone.
    """
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def weight_bytes(model: nn.Module, device: torch.device | None = None) -> int:
    """Bytes of a model's parameters and buffers; of those on `device`, if it is given."""
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.nbytes for tensor in tensors if device is None or tensor.device.type == device.type)


def free_bytes(device: torch.device) -> float:
    """Bytes that torch may still take of a GPU; on a CPU there is no limit to keep to."""
    return _limit(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else float("inf")


def would_be_free(model: nn.Module, device: torch.device) -> float:
    """Bytes that would be free on a GPU without the model."""
    return free_bytes(device) + weight_bytes(model, device)


def peak_left(device: torch.device, margin: float) -> float:
    """Bytes that the fullest moment of this process left free on a GPU, less the margin."""
    return (1 - margin) * _limit(device) - torch.cuda.max_memory_allocated(device)


def _limit(device: torch.device) -> float:
    """Bytes that torch may take of a GPU: those it has, and what is free, up to the fraction that was set."""
    free, total = torch.cuda.mem_get_info(device)
    with torch.cuda.device(device):
        share = torch.cuda.get_per_process_memory_fraction()  # which refuses a device without a number
    return min(torch.cuda.memory_reserved(device) + free, share * total)
