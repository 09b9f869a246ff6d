"""One layer of an attached model: its stream and side inputs gathered before it, its stream restored after it.

- The family's `Stack` says which arguments those are, the forward's state which rows of them.
- A compiled layer is routed outside the compiled code, which thereby is the dense model's at one more length. What
  enters that code and is no `forward` of the layer (`block.compile()`, `torch.compile(block)` in the list of layers) is
  wrapped when the model next runs.
- A checkpointed layer of a model that is compiled whole is routed outside the checkpoint, where the model lets its
  checkpoint function be replaced, as diffusers' do: compiled checkpoints have no side effects, and break the graph.
- One module may be several layers: the next of its indices is the one that runs.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from tread.attach.around import Around
from tread.attach.family import Side, Stack
from tread.attach.rotary import FullLength
from tread.attach.wrappers import wrapped_in
from tread.routing.handle import Handle
from tread.routing.state import Where


class Layer(Around):
    """One module of an attached model that is a layer, or several: what goes in and comes out in a routed forward."""

    def __init__(self, handle: Handle, block: nn.Module) -> None:
        super().__init__()
        self.handle, self.block = handle, block
        self._indices: list[tuple[int, Stack, list[_Named]]] = []
        parameters = list(inspect.signature(type(block).forward).parameters)[1:]
        self._places = {name: place for place, name in enumerate(parameters)}

    def add(self, index: int, stack: Stack) -> None:
        """Be the layer `index` too."""
        self._indices.append((index, stack, [(side, *_split(side.name), repr(side)) for side in stack.sides]))

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output; routed where the forward that runs now is."""
        state = self.handle.state
        if torch.compiler.is_compiling() and state.recomputed:
            return _uncompiled(self, forward, args, kwargs)
        routed = state.routed
        if not routed:
            self.handle.check_foreign(type(self.block).__name__, training=self.block.training)
        index, stack, sides = self._next(state.layer)
        if routed:
            args, kwargs = self._enter(index, stack, sides, args, kwargs)
        before, state.running, self.quiet = state.running, self, True
        try:
            output = forward(*args, **kwargs)
        finally:
            state.running, self.quiet = before, False
        return self._exit(index, stack, output) if routed else output

    def _next(self, last: int) -> tuple[int, Stack, list["_Named"]]:
        for one in self._indices:
            if one[0] > last:
                return one
        return self._indices[-1]

    def follow_compile(self, module: nn.Module) -> None:
        """Route outside whatever enters compiled code, from the `module` in the list of layers on."""
        for owner, name in _compiled(module):
            if not isinstance(entry := owner.__dict__[name], CompiledCall):
                setattr(owner, name, CompiledCall(self, entry))

    def leave_compiled(self, module: nn.Module) -> None:
        """Put back what enters compiled code."""
        for owner, name in _compiled(module):
            if isinstance(entry := owner.__dict__[name], CompiledCall):
                setattr(owner, name, entry.inner)

    def _enter(
        self, index: int, stack: Stack, sides: list["_Named"], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the stream and its side inputs gathered."""
        state, given = self.handle.state, self._argument
        stream = given(stack.stream, args, kwargs)
        turned = _turned(stack, stream)
        entered = state.enter(index, turned, stack.image)
        if entered is turned and not state.inside:
            return args, kwargs
        changed: dict[str, Any] = {stack.stream: _turned_back(stack, entered, stream)}
        alone = stream.ndim == 2
        for side, name, entry, key in sides if state.inside else ():
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

    def _exit(self, index: int, stack: Stack, output: Any) -> Any:
        """The layer's output with the stream restored where a window ends."""
        state, place = self.handle.state, stack.returns
        returned, inside = output if place is None else output[place], state.inside
        stream = _turned_back(stack, state.exit(index, _turned(stack, returned), stack.image), returned)
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

    def _gathered(self, side: Side, key: str, value: Any, image: Where | int, alone: bool) -> Any:
        """A side input for the tokens in the stream: looked at once per window, where the model passes one object."""
        make = lambda: self._side(side, value, side.name, image, alone)  # noqa: E731
        return self.handle.state.once((key, image, alone), value, make)

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


@_disable_dynamo
def _uncompiled(layer: Layer, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A layer of a compiled segment inside a checkpointed function: compiled, its two passes would save differently."""
    return layer.call(forward, args, kwargs)


_Named = tuple[Side, str, str, str]
"""A side input with the argument it is in, the entry of it where that is a mapping, and what tells it from others."""


class CompiledCall:
    """What enters a layer's compiled code, with routing outside it."""

    def __init__(self, layer: Layer, inner: Any) -> None:
        self.layer, self.inner = layer, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) if self.layer.quiet else self.layer.call(self.inner, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)


class CheckpointCall:
    """A model's checkpoint function; in a model that is compiled whole, with routing outside it."""

    def __init__(self, layers: Mapping[nn.Module, Layer], inner: Any) -> None:
        self.layers, self.inner = layers, inner

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            layer = self.layers.get(getattr(block, "__self__", block))  # some models hand over `block.__call__`
            if layer is not None:
                return layer.call(partial(self.inner, block), args, kwargs)
        return self.inner(block, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)


def _compiled(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The attributes that enter compiled code before a layer's `forward`, from `module` in the list of layers on."""
    owners = [module, *wrapped_in(module)]
    for owner in owners:
        if owner.__dict__.get("_compiled_call_impl") is not None:
            yield owner, "_compiled_call_impl"
    for owner in owners[:-1]:
        if "forward" in owner.__dict__:  # torch.compile(module) has its compiled function there
            yield owner, "forward"


def _turned(stack: Stack, stream: Tensor) -> Tensor:
    """From the layer's order of axes to (B, L, D)."""
    if stack.dim == 1:
        return stream
    return stream.unsqueeze(0) if stream.ndim == 2 else stream.transpose(0, 1)


def _turned_back(stack: Stack, stream: Tensor, given: Tensor) -> Tensor:
    """From (B, L, D) to the order of axes of the tensor the layer gave."""
    if stack.dim == 1:
        return stream
    return stream.squeeze(0) if given.ndim == 2 else stream.transpose(0, 1)


def _split(name: str) -> tuple[str, str]:
    """The name of an argument, and the entry of it where it is a mapping."""
    argument, _, entry = name.partition(".")
    return argument, entry
