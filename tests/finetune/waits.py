"""Where code would make the host wait for a GPU, seen without one: tensors on the meta device stand for those on it.

A copy to the device waits unless it is told not to. Reading a list from the device waits, and goes on with made-up
numbers. What else waits, reading one value or an operation whose shape depends on values, meta tensors cannot do: it
raises.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_meta


def _place() -> str:
    """The innermost call outside torch and this file."""
    frames = (f for f in reversed(traceback.extract_stack()) if "/torch/" not in f.filename and f.filename != __file__)
    return next(f"{frame.filename}:{frame.lineno} {frame.line}" for frame in frames)


class _Copies(TorchDispatchMode):
    """Copies, and host tensors as indices of device tensors, which torch copies by itself."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_to_copy" and _on_host(args[0]) and str(kwargs.get("device")) == "meta":
            waits = not kwargs.get("non_blocking")
        elif name == "copy_" and _on_device(args[0]) and _on_host(args[1]):
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            waits = name in ("index", "index_put", "index_put_") and _on_device(args[0])
            waits = waits and any(_on_host(index) for index in args[1])
        if waits:
            self.found.append(_place())
        return func(*args, **kwargs)


class _Numbers(TorchFunctionMode):
    """Tensors made of the host's numbers, and lists made of tensors: no dispatch sees either."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
        if made and str(kwargs.get("device", getattr(args[0], "device", None))) == "meta" and not _on_device(args[-1]):
            self.found.append(_place())
        if func is Tensor.tolist and _on_device(args[0]):
            self.found.append(_place())
            return torch.arange(args[0].numel()).view(args[0].shape).tolist()
        return func(*args, **kwargs)


_AUTOCAST = torch.autocast


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
    """Autocast, which torch does not have for the meta device."""
    return nullcontext() if device_type == "meta" else _AUTOCAST(device_type, *args, **kwargs)


@contextmanager
def seen_waits() -> Iterator[list[str]]:
    """The lines that would wait, as they are run; the meta device is the GPU."""
    found: list[str] = []
    with _Copies(found), _Numbers(found), patch.object(torch, "autocast", _autocast):
        yield found
