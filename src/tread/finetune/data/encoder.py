"""The parts of a pipeline that encode data: loaded at first use, on the device whole or layer by layer, then freed.

A text encoder may be larger than the card that trains the model: Qwen2.5-VL has 15 GiB in bf16. If it does not fit, its
weights stay in host memory and diffusers copies those of each layer when it runs (`apply_group_offloading`).
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tread.kernels.offload.memory import free_bytes, weight_bytes

ROOM = 0.8
"""The share of free memory that weights may take; the rest is for activations."""


class Encoder:
    """A stock pipeline with a few parts, checked and loaded at first use."""

    def __init__(
        self,
        load: Callable[[], Any],
        check: Callable[[], object],
        device: torch.device,
        say: Callable[[str], object] = print,
    ) -> None:
        self._load, self._check, self._device, self._say = load, check, device, say
        self._pipeline: Any = None

    @property
    def pipeline(self) -> Any:
        """The pipeline, with its models on the device or offloaded to host memory."""
        if self._pipeline is None:
            self._check()
            self._pipeline = self._load()
            self._place()
        return self._pipeline

    def free(self) -> None:
        """Free the memory of the pipeline."""
        self._pipeline = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _place(self) -> None:
        models = [part for part in self._pipeline.components.values() if isinstance(part, nn.Module)]
        size = sum(map(weight_bytes, models))
        if size <= ROOM * free_bytes(self._device):
            self._pipeline.to(self._device)
            return
        names = " and ".join(type(model).__name__ for model in models)
        self._say(
            f"{names} would not fit on the GPU ({size / 2**30:.1f} GiB): the weights of each layer are copied there "
            "when it runs, which is slower."
        )
        for model in models:
            offload_leaves(model, self._device)


def offload_leaves(model: nn.Module, device: torch.device) -> None:
    """Keep a model's weights in host memory; each leaf module is copied to `device` while it runs."""
    from diffusers.hooks.group_offloading import apply_group_offloading

    apply_group_offloading(model, device, offload_type="leaf_level")
