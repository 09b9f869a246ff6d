"""The frozen tensors of one layer, packed into one block of host memory, so that one copy fetches the layer.

- A parameter or buffer stays the object it was; its `data` is a view of the host block, or of a slot on the device
  while the layer runs. So `state_dict`, `save_pretrained` and merging read the host's values.
- The block is registered with CUDA (page-locked) instead of allocated by torch, whose allocator of pinned memory
  rounds sizes up to a power of two: a layer of 340 MB would take 512.
- A layer with an offloaded weight ignores `.to(device)`; a change of dtype is refused.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tread.errors import ConfigError

ALIGNED = 256
"""Alignment of each tensor in the block, in bytes: compiled code relies on 16, copies prefer 256."""
PAGE = 4096
PLAIN = ("Parameter", "Tensor", "Buffer", "Params4bit")
"""Classes of tensors whose values are all in `data`, except for the small scales that bitsandbytes keeps on the
device."""


class HostLayer:
    """The frozen tensors of `layer` in host memory, except those in `shared`, which other modules use too.

    `device` computes; for a GPU the block is page-locked if the system allows it (`pinned`).
    """

    def __init__(self, layer: nn.Module, device: torch.device, shared: set[int]) -> None:
        self.tensors = [tensor for tensor in frozen(layer) if id(tensor) not in shared]
        self.ids = {id(tensor) for tensor in self.tensors}
        self._before = [tensor.device for tensor in self.tensors]
        starts, end = list[int](), 0
        for tensor in self.tensors:
            starts.append(end)
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        self._layout = [(start, tensor.nbytes, tensor.dtype, tensor.shape) for start, tensor in _zip(starts, self)]
        self.size = end
        """Bytes of the block."""
        whole = torch.empty(end + 2 * PAGE, dtype=torch.uint8, device="cpu")
        self.block = whole[-whole.data_ptr() % PAGE :][:end]  # pages of its own, as page-locking asks
        self.pinned = device.type != "cuda" or _register(self.block)
        self._parked = self.views(self.block)
        for view, tensor in _zip(self._parked, self):
            view.copy_(tensor.detach())
        self.park()

    def views(self, block: Tensor) -> list[Tensor]:
        """The tensors as views of a block of bytes, (size,)."""
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be used in training
            return [block[start : start + size].view(dtype).view(shape) for start, size, dtype, shape in self._layout]

    def use(self, views: Sequence[Tensor]) -> None:
        """Point the layer's tensors at `views`, a result of `views()`."""
        for view, tensor in _zip(views, self):
            tensor.data = view

    def park(self) -> None:
        """Point the layer's tensors at host memory."""
        self.use(self._parked)

    def restore(self) -> None:
        """Move each tensor to the device that it was on at construction."""
        for device, view, tensor in zip(self._before, self._parked, self.tensors, strict=True):
            tensor.data = view.to(device)

    def bring(self, device: torch.device) -> None:
        """Move the tensors to the device permanently."""
        self.use(self.views(self.block.to(device)))


def _zip(values: Sequence[Any], host: HostLayer) -> Iterator[tuple[Any, Tensor]]:
    return zip(values, host.tensors, strict=True)


def frozen(layer: nn.Module) -> list[Tensor]:
    """The parameters that are not trained, and the buffers; refuses those whose values are not in `data` alone."""
    tensors = [parameter for parameter in layer.parameters() if not parameter.requires_grad]
    tensors += [buffer for buffer in layer.buffers() if type(buffer) is Tensor]
    for tensor in tensors:
        if type(tensor).__name__ not in PLAIN or is_traceable_wrapper_subclass(tensor.data):
            raise ConfigError(
                f"a layer with weights of class {type(tensor).__name__} cannot be offloaded: quantize the base to "
                "'int8', 'int4', 'fp8' or 'nf4', or leave offload out."
            )
    return tensors


def _register(block: Tensor) -> bool:
    """Page-lock the memory of a block until it is freed; False if the system has no more to lock."""
    cuda: Any = torch.cuda.cudart()
    if block.nbytes == 0:
        return True
    if int(cuda.cudaHostRegister(block.data_ptr(), -(-block.nbytes // PAGE) * PAGE, 0)) != 0:
        with suppress(RuntimeError):  # CUDA reports the error again at the next kernel launch
            torch.zeros((), device="cuda")
        return False
    weakref.finalize(block, cuda.cudaHostUnregister, block.data_ptr()).atexit = False
    return True


class Anchored:
    """The `_apply` of a module that holds offloaded tensors: `module.to(device)` moves the others."""

    def __init__(self, layer: nn.Module, host: HostLayer) -> None:
        self._layer, self._host = layer, host

    def __call__(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def changed(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._host.ids:
                return change(tensor)
            if change(torch.empty(0, dtype=tensor.dtype)).dtype != tensor.dtype:
                raise ConfigError(
                    "the weights of offloaded layers keep their dtype: convert the model before it is offloaded."
                )
            return tensor

        return type(self._layer)._apply(self._layer, changed, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied layer is not offloaded."""
        return partial(type(self._layer)._apply, memo[id(self._layer)])

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self._layer)._apply, self._layer)
