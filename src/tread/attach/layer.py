"""One layer of an attached model: gathers its stream and side inputs, calls it, restores its stream.

- The family's `Stack` names the arguments, the forward's state has the rows.
- One module may be several layers: a call runs the next of its indices.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from tread.around import Around
from tread.attach.family import Side, Stack
from tread.attach.rotary import FullLength
from tread.attach.static import StaticShapes
from tread.attach.wrappers import naming_forward
from tread.kernels.compiling import Compiled
from tread.routing.handle import Handle
from tread.routing.state import End


class _Named(NamedTuple):
    """A side input, and how it is passed."""

    side: Side
    argument: str
    entry: str
    """The entry of the argument, if that is a mapping; else ""."""
    is_table: bool
    """Whether all samples share it, (S, ...)."""


class Layer(Around):
    """The wrapper of one module that is a layer, or several, of an attached model."""

    def __init__(self, handle: Handle, block: nn.Module, static: StaticShapes) -> None:
        super().__init__()
        self.handle, self.block, self._static = handle, block, static
        self._indices: list[tuple[int, Stack, list[_Named]]] = []
        """One entry per layer that the module is: its index, its stack and the stack's side inputs."""
        arguments = list(inspect.signature(naming_forward(block)).parameters)[1:]
        self._positions = {name: position for position, name in enumerate(arguments)}

    def add(self, index: int, stack: Stack) -> None:
        """Register the module as layer `index`."""
        self._indices.append((index, stack, _named(stack)))

    def call(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output, routed if the current forward is."""
        state = self.handle.state
        if torch.compiler.is_compiling() and state.recomputed:
            return _uncompiled(self, module, forward, args, kwargs)
        routed = state.routed
        if not routed:
            self.handle.check_unrouted(module)
        index, stack, sides = self._next(state.layer)
        if routed:
            args, kwargs = self._enter(index, stack, sides, args, kwargs)
        before, state.running, self.quiet = state.running, self, True
        if isinstance(forward, Compiled) or hasattr(forward, "_torchdynamo_orig_callable"):
            self._static.fix(args, kwargs)
        try:
            output = forward(*args, **kwargs)
        finally:
            state.running, self.quiet = before, False
        return self._exit(index, stack, output) if routed else output

    def _next(self, last: int) -> tuple[int, Stack, list[_Named]]:
        """The entry of the module's first index after `last`, the last layer entered; its last entry if none is."""
        return next((entry for entry in self._indices if entry[0] > last), self._indices[-1])

    def _enter(
        self, index: int, stack: Stack, sides: list[_Named], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the stream and its side inputs gathered."""
        state, given = self.handle.state, self._argument
        stream = given(stack.stream, args, kwargs)
        batch_first = _to_batch_first(stack, stream)
        entered = state.enter(index, batch_first, stack.image)
        if entered is batch_first and not state.inside:
            return args, kwargs
        changed: dict[str, Any] = {stack.stream: _to_layer_order(stack, entered, stream)}
        unbatched = stream.ndim == 2
        for side, name, entry, is_table in sides if state.inside else ():
            # a square mask has two token axes and two sides, which apply in turn
            value = changed[name] if name in changed else given(name, args, kwargs)
            if value is None:
                continue
            image = given(side.after, args, kwargs).shape[1] if side.after else side.image or stack.image
            is_table |= unbatched
            if side.full:
                length = entered.shape[1] + state.dropped
                changed[name] = FullLength(value, state.rows(length, image), length, side.dim)
            elif not entry:
                changed[name] = self._side(side, value, side.name, image, is_table)
            elif value.get(entry) is not None:
                changed[name] = {**value, entry: self._side(side, value[entry], side.name, image, is_table)}
        for name in stack.counts if state.inside else ():
            if (count := given(name, args, kwargs)) is not None:
                changed[name] = count - state.dropped
        positional = list(args)
        for name in list(changed):
            if name not in kwargs:
                positional[self._positions[name]] = changed.pop(name)
        return tuple(positional), {**kwargs, **changed}

    def _exit(self, index: int, stack: Stack, output: Any) -> Any:
        """The layer's output, its stream restored at the end of a window."""
        state, item = self.handle.state, stack.returns
        returned, inside = output if item is None else output[item], state.inside
        stream = _to_layer_order(stack, state.exit(index, _to_batch_first(stack, returned), stack.image), returned)
        if item is None:
            return stream
        others = [*output[:item], *output[item + 1 :]]
        if inside and not state.inside:
            # text sliced from a joined tensor would keep it alive and has strides that recompile the next layer; a
            # clone, because a slice of one sample counts as contiguous whatever its strides
            layout = torch.contiguous_format
            others = [x.clone(memory_format=layout) if isinstance(x, Tensor) else x for x in others]
        return (*others[:item], stream, *others[item:])

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An argument of the layer by name; None if it was not given."""
        if name in kwargs:
            return kwargs[name]
        position = self._positions.get(name, len(args))
        return args[position] if position < len(args) else None

    def _side(self, side: Side, value: Any, name: str, image: End | int, is_table: bool) -> Any:
        """A side input gathered, member by member; `is_table`: that of one sample has no batch axis, as in a dense
        forward, so that layers whose rotary function no family knows take it too."""
        if isinstance(value, tuple | list):
            members = range(len(value)) if side.member is None else (side.member,)
            inner = side if side.member is None else replace(side, member=None)
            return type(value)(
                self._side(inner, item, f"{name}.{i}", image, is_table) if i in members else item
                for i, item in enumerate(value)
            )
        if not isinstance(value, Tensor) or (side.ndim is not None and value.ndim != side.ndim):
            return value
        if value.shape[side.dim] == 1:  # one entry that serves all tokens
            return value
        if side.same:
            return self.handle.state.shortened(name, value, side.dim, image)
        rows = self.handle.state.side(name, value, side.dim, image)
        return rows.squeeze(0) if is_table and rows is not None else rows


@_disable_dynamo
def _uncompiled(layer: Layer, *given: Any) -> Any:
    """`Layer.call` outside the graph: compiled, the two passes of a checkpoint would save different tensors."""
    return layer.call(*given)


def _to_batch_first(stack: Stack, stream: Tensor) -> Tensor:
    """The stream from the layer's axis order to (B, L, D)."""
    if stack.dim == 1:
        return stream
    return stream.unsqueeze(0) if stream.ndim == 2 else stream.transpose(0, 1)


def _to_layer_order(stack: Stack, stream: Tensor, given: Tensor) -> Tensor:
    """The stream from (B, L, D) to the axis order of `given`."""
    if stack.dim == 1:
        return stream
    return stream.squeeze(0) if given.ndim == 2 else stream.transpose(0, 1)


def _named(stack: Stack) -> list[_Named]:
    """The side inputs of a stack's layers; an argument with two sides is a mask (S, S), and no table."""
    names = [side.name for side in stack.sides]
    return [
        _Named(side, *_split(side.name), is_table=side.dim == 0 and names.count(side.name) == 1) for side in stack.sides
    ]


def _split(name: str) -> tuple[str, str]:
    """The name of an argument, and of its entry if it is a mapping, else ""."""
    argument, _, entry = name.partition(".")
    return argument, entry
