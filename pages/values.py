"""Values where a forward reads them: masks and positions are real among fake tensors, which have shapes alone.

Some models cut a text at its mask, or look up on the device where the image begins. Inside `Values`, a call whose
tensors are all real is computed, if its result holds no floating-point numbers; every other call stays fake. A real
mask that indexes a fake tensor becomes the list of its positions, so the shape of the result is known.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only


class Values(TorchFunctionMode):
    """Integers and truth values are computed; floating-point numbers have shapes alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func is torch.all and isinstance(args[0], FakeTensor):  # whether an input is missing, that is zeros
            return _real(torch.tensor, True)
        if any(isinstance(x, FakeTensor) for x in tensors):
            if func in (Tensor.__getitem__, Tensor.__setitem__):
                stream, index, *value = args
                args = (stream, _positions(index), *value)
            if func in (torch.repeat_interleave, Tensor.repeat_interleave) and isinstance(args[1], Tensor):
                kwargs = {**kwargs, "output_size": _real(lambda repeats: int(repeats.sum()), args[1])}
            return func(*args, **kwargs)
        found = _real(func, *args, **kwargs)
        floating = [x for x in tree_leaves(found) if isinstance(x, Tensor) and not _counts(x)]
        return func(*args, **kwargs) if floating else found


def without_values(call: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, values: bool) -> Any:
    """A call that sees fake tensors only, outside of `Values`: compiled code takes neither real ones nor modes."""
    with _pop_mode_temporarily() if values else nullcontext():
        args, kwargs = tree_map_only(Tensor, _fake, (tuple(args), dict(kwargs)))
        return call(*args, **kwargs)


def _fake(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else torch.empty_like(tensor)


def _real(func: Any, *args: Any, **kwargs: Any) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _counts(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _positions(index: Any) -> Any:
    """An index with each real mask of one axis as the positions that it marks."""
    if isinstance(index, tuple):
        return tuple(_positions(part) for part in index)
    if isinstance(index, Tensor) and not isinstance(index, FakeTensor) and index.dtype == torch.bool:
        assert index.ndim == 1
        return _real(lambda: index.nonzero()[:, 0])
    return index
