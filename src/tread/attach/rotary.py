"""Stock rotary functions, written for one table shared by all samples, wrapped to take a table per sample.

A rotation is per token, so B samples of K tokens are rotated exactly like one sample of B * K tokens: the samples are
concatenated, the stock function runs on a table of its usual shape, and the result is split again. No rotation is
written here. A table shared by all samples goes to the stock function unchanged.

The function is replaced once, in the module whose code looks it up, and restored when the last attached model is
detached. Models that share a function may differ in their token axis: a call that passes `sequence_dim` states it, and
two contradictory declarations cannot be in use at once.

Some models rotate by the grid of the full sequence instead of by a table. Their layers are given a `FullLength`: the
rows are scattered into a full sequence, the stock function runs on that, and the rows are gathered again.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor

from tread.attach.family import Rotary
from tread.errors import ConfigError
from tread.routing.ops import gather

_installed: WeakKeyDictionary[Callable[..., Any], tuple[Callable[..., Any], Rotary]] = WeakKeyDictionary()
"""Wrapper function -> what it wraps, and for what. Not attributes of the function: `functools.wraps` copies those."""
_users: dict[str, WeakSet[object]] = {}
"""Path of a replaced function -> the handles that use it; weak, as models may be freed without detaching."""


@dataclass(frozen=True, eq=False)
class FullLength:
    """A side input that serves the full sequence only, and the rows of the sequence that are in the stream."""

    value: Any
    rows: Tensor
    """(B, K), ascending."""
    length: int
    """The length of the full sequence."""
    axis: int
    """The token axis of the rotated tensor."""

    def __call__(self, x: Tensor) -> Tensor:
        """Call the value, a function of the full sequence, on x with K tokens."""
        return self.apply(self.value, x)

    def apply(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a per-token function of the full sequence to x with K tokens; dropped tokens are 0.

        It costs the function's dense time and three copies.
        """
        given = x.movedim(self.axis, 1)  # (B, K, ...)
        index = self.rows.unsqueeze(-1).expand(-1, -1, math.prod(given.shape[2:]))  # (B, K, D), no copy
        full = x.new_zeros(given.shape[0], self.length, index.shape[2]).scatter(1, index, given.flatten(2))  # (B, L, D)
        out = function(full.unflatten(2, given.shape[2:]).movedim(1, self.axis))
        return gather(out.movedim(self.axis, 1), self.rows).movedim(1, self.axis)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a routed layer used {name!r} of an argument that its family declares with Side(full=True), outside the "
            "functions in Family.rotary: only those know which rows are in the stream."
        )


def install(rotary: Rotary, user: object) -> None:
    """Replace the function by its wrapper, unless that is there already; another library's replacement is wrapped."""
    module, name = _resolve(rotary.function)
    function = getattr(module, name)
    stock, installed = _installed.get(function, (function, None))
    users = _users.setdefault(rotary.function, WeakSet())
    if installed is not None and installed.function == rotary.function and installed != rotary and users:
        raise ConfigError(
            f"{rotary.function} is in use by an attached model whose family declares it differently (token axis, "
            "tables). Detach that model first."
        )
    if installed != rotary:  # stock, or imported from a module where it was replaced
        setattr(module, name, _per_sample(stock, rotary))
    users.add(user)


def remove(rotary: Rotary, user: object) -> None:
    """Restore the stock function, if no other attached model uses the wrapper."""
    users = _users[rotary.function]
    users.discard(user)
    if not users:
        module, name = _resolve(rotary.function)
        function = getattr(module, name)
        setattr(module, name, _installed.get(function, (function, rotary))[0])  # its own, if a library replaced ours


def _resolve(path: str) -> tuple[Any, str]:
    module, _, name = path.rpartition(".")
    return importlib.import_module(module), name


def _per_sample(stock: Callable[..., Any], rotary: Rotary) -> Callable[..., Any]:
    tables, parameters = rotary.tables, inspect.signature(stock).parameters
    names = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    dim = parameters.get("sequence_dim")

    @functools.wraps(stock)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        while len(args) < len(names) and names[len(args)] in kwargs:
            args = (*args, kwargs.pop(names[len(args)]))
        full = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, FullLength)), None)
        if full is not None:
            rest, named = [_value(arg) for arg in args[1:]], {key: _value(arg) for key, arg in kwargs.items()}
            return full.apply(lambda x: stock(x, *rest, **named), args[0])
        if not tables:
            return stock(*args, **kwargs)
        first = args[tables[0]]
        first = first[0] if isinstance(first, tuple | list) else first
        if first.ndim == 2 or (rotary.real and first.is_complex()):
            return stock(*args, **kwargs)
        batch, axis = args[0].shape[0], rotary.axis
        if dim is not None:
            given = dict(zip(names, args, strict=False)) | kwargs
            axis = given.get("sequence_dim", dim.default)
        rotated = [_concatenated(x, axis) for x in args[: rotary.turns]]
        rest = [_flat(arg) if i in tables else arg for i, arg in enumerate(args)][rotary.turns :]
        out = stock(*rotated, *rest, **kwargs)
        return _split(out, axis, batch) if rotary.turns == 1 else tuple(_split(x, axis, batch) for x in out)

    _installed[rotate] = stock, rotary
    return rotate


def _value(arg: Any) -> Any:
    return arg.value if isinstance(arg, FullLength) else arg


def _concatenated(x: Tensor, axis: int) -> Tensor:
    """(B, ...) with K on the token axis -> (1, ...) with B * K there."""
    return x.movedim(axis, 1).flatten(0, 1).unsqueeze(0).movedim(1, axis)


def _split(x: Tensor, axis: int, batch: int) -> Tensor:
    """(1, ...) with B * K on the token axis -> (B, ...) with K there."""
    return x.movedim(axis, 1).squeeze(0).unflatten(0, (batch, -1)).movedim(1, axis)


def _flat(table: Any) -> Any:
    """(B, K, D) -> (B * K, D), member by member."""
    return type(table)(_flat(t) for t in table) if isinstance(table, tuple | list) else table.flatten(0, 1)
