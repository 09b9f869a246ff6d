"""Rotary functions that were written for one table for all samples, taught to take a table per sample.

A rotation looks at one token at a time, so a batch of B samples with K tokens each is rotated exactly like one sample
with B * K tokens: the samples are laid end to end, the stock function runs on its own kind of table, and the result
is cut up again. No rotation is written here. A table shared by all samples goes to the stock function untouched.

The name is replaced in the module whose code looks it up, once, and put back when the last attached model leaves.
Models that look up the same name may lay their tokens out differently: a call that passes `sequence_dim` says the axis
itself, and two declarations that contradict each other cannot be in use at once.

Some models rotate by the grid of the full sequence instead of by a table. Their layers are given a `FullLength`: the
rows return to their positions in a full sequence, the stock function runs on that, and the rows are taken out again.
"""

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import Tensor

from tread.attach.family import Rotary
from tread.errors import ConfigError
from tread.routing.ops import gather

_users: dict[str, WeakSet[object]] = {}
"""Who needs the taught function, by its path; a model that is gone needs it no more."""


@dataclass(frozen=True, eq=False)
class FullLength:
    """A side input that serves the full sequence only, and which rows of that are in the stream."""

    value: Any
    rows: Tensor
    """(B, K), ascending."""
    length: int
    """The tokens of the full sequence."""
    axis: int
    """The token axis of what is rotated."""

    def __call__(self, x: Tensor) -> Tensor:
        """The value, where it is a function, on x with K tokens."""
        return self.apply(self.value, x)

    def apply(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A function of the full sequence on x with K tokens: dropped ones are 0 there, and no token looks at another.

        It costs the function's dense time, and three copies.
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
    """Put the taught function in place, unless it is there."""
    module, name = _resolve(rotary.function)
    function = getattr(module, name)
    taught_for = getattr(function, "rotary", None)
    users = _users.setdefault(rotary.function, WeakSet())
    if taught_for is not None and taught_for.function == rotary.function and taught_for != rotary and users:
        raise ConfigError(
            f"{rotary.function} is in use by an attached model that lays its tokens out differently. Detach that first."
        )
    if taught_for != rotary:  # not taught, or imported from a place where it was
        setattr(module, name, _taught(getattr(function, "stock", function), rotary))
    users.add(user)


def remove(rotary: Rotary, user: object) -> None:
    """Put the stock function back, if no other attached model needs the taught one."""
    users = _users[rotary.function]
    users.discard(user)
    if not users:
        module, name = _resolve(rotary.function)
        setattr(module, name, getattr(module, name).stock)


def _resolve(path: str) -> tuple[Any, str]:
    module, _, name = path.rpartition(".")
    return importlib.import_module(module), name


def _taught(stock: Callable[..., Any], rotary: Rotary) -> Callable[..., Any]:
    tables = rotary.tables

    @functools.wraps(stock)
    def rotate(*args: Any, **kwargs: Any) -> Any:
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
        batch, axis = args[0].shape[0], kwargs.get("sequence_dim", rotary.axis)
        laid_out = [_end_to_end(x, axis) for x in args[: rotary.turns]]
        rest = [_flat(arg) if i in tables else arg for i, arg in enumerate(args)][rotary.turns :]
        out = stock(*laid_out, *rest, **kwargs)
        return _cut(out, axis, batch) if rotary.turns == 1 else tuple(_cut(x, axis, batch) for x in out)

    vars(rotate).update(stock=stock, rotary=rotary)
    return rotate


def _value(arg: Any) -> Any:
    return arg.value if isinstance(arg, FullLength) else arg


def _end_to_end(x: Tensor, axis: int) -> Tensor:
    """(B, ...) with K on the token axis -> (1, ...) with B * K there."""
    return x.movedim(axis, 1).flatten(0, 1).unsqueeze(0).movedim(1, axis)


def _cut(x: Tensor, axis: int, batch: int) -> Tensor:
    """(1, ...) with B * K on the token axis -> (B, ...) with K there."""
    return x.movedim(axis, 1).squeeze(0).unflatten(0, (batch, -1)).movedim(1, axis)


def _flat(table: Any) -> Any:
    """(B, K, D) -> (B * K, D), member by member."""
    return type(table)(_flat(t) for t in table) if isinstance(table, tuple | list) else table.flatten(0, 1)
