"""What a layer's recomputation needs beside its arguments: RNG states and autocast settings."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class HiddenInputs:
    """A layer's inputs other than its arguments: RNG states and autocast settings, on the devices of `tensors`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._random, (self._devices, self._states) = torch.get_rng_state(), get_device_states(*tensors)
        types = {"cpu", *(x.device.type for x in tensors)}
        self._autocast = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in types]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, both are as they were at construction."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices))
            torch.set_rng_state(self._random)
            if self._devices:
                set_device_states(self._devices, self._states)
            for name, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(name, dtype, enabled=enabled))
            yield


def leaves_of(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaves that autograd would reach from `outputs`, other than those `known`."""
    ids, seen = {id(x) for x in known}, set[Any]()
    waiting: list[Any] = [x.grad_fn for x in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in ids:
            yield leaf
        waiting += [other for other, _ in node.next_functions]
