"""Gather rows of a sequence and restore them, saving only the indices for backward.

- `gather` copies K rows; `restore` writes one full sequence. Neither allocates anything else of that size.
- `index_select`, on rows flattened over the batch, and `scatter` save only the index for backward;
  `torch.gather` saves its whole input and `index_copy` its source.
- No row is taken twice, so backward copies rows; torch's own backward would add them with atomics.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad


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
    """Whether forward-mode gradients or torch.func's transforms are computed, which need torch's own operations."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or _functorch.peek_interpreter_stack() is not None


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
