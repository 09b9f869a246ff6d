"""Gather rows of a sequence and restore them, saving only the indices for backward.

- `gather` copies K rows; `restore` writes one full sequence. Neither allocates anything else of that size.
- `index_select`, on rows flattened over the batch, and `scatter` save only the index for backward;
  `torch.gather` saves its whole input and `index_copy` its source.
- No row is taken twice, so backward copies rows; torch's own backward would add them with atomics. Forward-mode
  gradients and torch.func's transforms get torch's own operations, which know all of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


def flat_rows(ids: Tensor, tokens: int) -> Tensor:
    """Indices (B, K) into S tokens each -> indices (B * K,) into the rows of a flattened (B * S, ...)."""
    offsets = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1) * tokens  # (B, 1)
    return (ids + offsets).flatten()  # (B * K,)


def gather(x: Tensor, ids: Tensor) -> Tensor:
    """The rows `ids` (B, K) of x (B, S, ...) -> (B, K, ...)."""
    rows, flat = flat_rows(ids, x.shape[1]), x.flatten(0, 1)
    taken: Any = flat.index_select(0, rows) if _is_transformed() else _Taken.apply(flat, rows)
    return taken.unflatten(0, ids.shape)  # (B, K, ...)


def _is_transformed() -> bool:
    """Whether forward-mode gradients are computed, or this is inside torch.func's transforms."""
    return not torch.compiler.is_compiling() and (forward_ad._current_level >= 0 or _is_inside_func())


def _is_inside_func() -> bool:
    return _functorch.peek_interpreter_stack() is not None


def untransformed(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function outside torch.func's transforms (jvp, grad): what it computes or changes outlives them."""
    if torch.compiler.is_compiling() or not _is_inside_func():
        return function(*args)
    with torch._C._DisableFuncTorch():
        return function(*map(_value, args))


def _value(argument: Any) -> Any:
    """The tensor inside the wrappers of gradient transforms."""
    while isinstance(argument, Tensor) and _functorch.is_gradtrackingtensor(argument):
        argument = _functorch.get_unwrapped(argument)
    return argument


class _Taken(torch.autograd.Function):
    """The distinct rows (K,) of x (N, ...) -> (K, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(rows)
        ctx.count = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), (rows,) = gradients, ctx.saved_tensors
        return gradient.new_zeros(ctx.count, *gradient.shape[1:]).index_copy_(0, rows, gradient), None


def restore(x: Tensor, ids: Tensor, bypass: Tensor) -> Tensor:
    """The rows x (B, K, D) written over those rows of bypass (B, S, D); all other rows pass through.

    The result has the strides of bypass, so that a compiled layer after a window sees the strides of a dense forward.
    """
    rows = ids.unsqueeze(-1).expand(-1, -1, x.shape[-1])  # (B, K, D), no copy
    x = x.to(bypass.dtype)
    if bypass.is_contiguous():  # out of place: a selective policy may have saved the copy
        return bypass.scatter(1, rows, x)  # (B, S, D)
    return bypass.clone().scatter_(1, rows, x)  # (B, S, D)
