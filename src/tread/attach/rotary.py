"""Rotary functions that were written for one table for all samples, taught to take a table per sample.

A rotation looks at one token at a time, so a batch of B samples with K tokens each is rotated exactly like one sample
with B * K tokens: the samples are laid end to end, the stock function runs on its own kind of table, and the result
is cut up again. No rotation is written here. A table shared by all samples goes to the stock function untouched.

The name is replaced in the module whose code looks it up, once, and put back when the last attached model leaves.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tread.attach.family import Rotary

_in_use: dict[str, int] = {}


def install(rotary: Rotary) -> None:
    """Put the taught function in place, unless it is there."""
    _in_use[rotary.function] = _in_use.get(rotary.function, 0) + 1
    module, name = _resolve(rotary.function)
    function = getattr(module, name)
    if not hasattr(function, "stock"):
        setattr(module, name, _taught(function, rotary))


def remove(rotary: Rotary) -> None:
    """Put the stock function back, if no attached model needs the other."""
    _in_use[rotary.function] -= 1
    if _in_use[rotary.function] == 0:
        module, name = _resolve(rotary.function)
        setattr(module, name, getattr(module, name).stock)


def _resolve(path: str) -> tuple[Any, str]:
    module, _, name = path.rpartition(".")
    return importlib.import_module(module), name


def _taught(stock: Callable[..., Any], rotary: Rotary) -> Callable[..., Any]:
    axis, tables = rotary.axis, rotary.tables

    @functools.wraps(stock)
    def rotate(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        first = args[tables[0] - 1]
        first = first[0] if isinstance(first, tuple | list) else first
        if first.ndim == 2:
            return stock(x, *args, **kwargs)
        batch = x.shape[0]
        laid_out = x.movedim(axis, 1).flatten(0, 1)  # (B * K, ...)
        laid_out = laid_out.unsqueeze(0).movedim(1, axis)  # (1, ...) with B * K on the token axis
        flat = [_flat(arg) if i + 1 in tables else arg for i, arg in enumerate(args)]
        out = stock(laid_out, *flat, **kwargs).movedim(axis, 1).squeeze(0)  # (B * K, ...)
        return out.unflatten(0, (batch, -1)).movedim(1, axis)

    vars(rotate)["stock"] = stock
    return rotate


def _flat(table: Any) -> Any:
    """(B, K, D) -> (B * K, D), member by member."""
    return type(table)(_flat(t) for t in table) if isinstance(table, tuple | list) else table.flatten(0, 1)
