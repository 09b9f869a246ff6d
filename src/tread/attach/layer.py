"""One layer of an attached model: its stream and side inputs gathered before it, its stream restored after it.

The family's `Stack` says which arguments those are, the forward's state which rows of them; `hooks.py` says when.
"""

import inspect
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tread.attach.family import Side, Stack
from tread.attach.rotary import FullLength
from tread.routing.state import State, Where


class Attached(Protocol):
    """What a layer needs of the handle of its model."""

    state: State


class Layer:
    """One layer of an attached model: what goes into it and comes out of it in a routed forward."""

    def __init__(self, handle: Attached, block: nn.Module, stack: Stack, index: int) -> None:
        self.handle, self.block, self.stack, self.index = handle, block, stack, index
        parameters = list(inspect.signature(type(block).forward).parameters)[1:]
        self._places = {name: place for place, name in enumerate(parameters)}
        self._sides = [(side, *_split(side.name), repr(side)) for side in stack.sides]

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the stream and its side inputs gathered."""
        state, stack, given = self.handle.state, self.stack, self._argument
        stream = given(stack.stream, args, kwargs)
        turned = self._turned(stream)
        entered = state.enter(self.index, turned, stack.image)
        if entered is turned and not state.inside:
            return args, kwargs
        changed: dict[str, Any] = {stack.stream: self._turned_back(entered, stream)}
        alone = stream.ndim == 2
        for side, name, entry, key in self._sides if state.inside else ():
            # a square mask has two token axes: two sides, one by one
            value = changed[name] if name in changed else given(name, args, kwargs)
            if value is None:
                continue
            image = given(side.after, args, kwargs).shape[1] if side.after else side.image or stack.image
            if side.full:
                length = entered.shape[1] + state.dropped
                changed[name] = FullLength(value, state.rows(length, image), length, side.dim)
            elif not entry:
                changed[name] = self._gathered(side, key, value, image, alone)
            elif value.get(entry) is not None:
                changed[name] = {**value, entry: self._gathered(side, key, value[entry], image, alone)}
        for name in stack.counts if state.inside else ():
            if (count := given(name, args, kwargs)) is not None:
                changed[name] = count - state.dropped
        positional = list(args)
        for name in list(changed):
            if name not in kwargs:
                positional[self._places[name]] = changed.pop(name)
        return tuple(positional), {**kwargs, **changed}

    def exit(self, output: Any) -> Any:
        """The layer's output with the stream restored where a window ends."""
        state, place = self.handle.state, self.stack.returns
        returned, inside = output if place is None else output[place], state.inside
        stream = self._turned_back(state.exit(self.index, self._turned(returned), self.stack.image), returned)
        if place is None:
            return stream
        others = [*output[:place], *output[place + 1 :]]
        if inside and not state.inside:
            # text cut from a joined tensor would keep that alive, and has strides no dense forward was compiled for
            # (a clone, because one sample's cut counts as contiguous whatever its strides)
            layout = torch.contiguous_format
            others = [item.clone(memory_format=layout) if isinstance(item, Tensor) else item for item in others]
        return (*others[:place], stream, *others[place:])

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An argument of the layer by name; None where it was not given."""
        if name in kwargs:
            return kwargs[name]
        place = self._places.get(name, len(args))
        return args[place] if place < len(args) else None

    def _turned(self, stream: Tensor) -> Tensor:
        """From the layer's order of axes to (B, L, D)."""
        if self.stack.dim == 1:
            return stream
        return stream.unsqueeze(0) if stream.ndim == 2 else stream.transpose(0, 1)

    def _turned_back(self, stream: Tensor, given: Tensor) -> Tensor:
        """From (B, L, D) to the order of axes of the tensor the layer gave."""
        if self.stack.dim == 1:
            return stream
        return stream.squeeze(0) if given.ndim == 2 else stream.transpose(0, 1)

    def _gathered(self, side: Side, key: str, value: Any, image: Where | int, alone: bool) -> Any:
        """A side input for the tokens in the stream: looked at once per window, where the model passes one object."""
        done, where = self.handle.state.done, (key, image, alone)
        if where not in done or done[where][0] is not value:
            done[where] = value, self._side(side, value, side.name, image, alone)
        return done[where][1]

    def _side(self, side: Side, value: Any, name: str, image: Where | int, alone: bool) -> Any:
        """The rows of a side input, member by member; `alone`: the stream has no batch axis, and neither may they."""
        if isinstance(value, tuple | list):
            members = range(len(value)) if side.member is None else (side.member,)
            inner = side if side.member is None else replace(side, member=None)
            return type(value)(
                self._side(inner, item, f"{name}.{i}", image, alone) if i in members else item
                for i, item in enumerate(value)
            )
        if not isinstance(value, Tensor) or (side.ndim is not None and value.ndim != side.ndim):
            return value
        if value.shape[side.dim] == 1:  # one entry that serves all tokens
            return value
        if side.same:
            return self.handle.state.shortened(value, side.dim, image)
        rows = self.handle.state.side(f"{name}:{side.dim}", value, side.dim, image)
        return rows.squeeze(0) if (alone or side.shared) and rows is not None else rows


def _split(name: str) -> tuple[str, str]:
    """The name of an argument, and the entry of it where it is a mapping."""
    argument, _, entry = name.partition(".")
    return argument, entry
