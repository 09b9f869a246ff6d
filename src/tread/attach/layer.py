"""One layer of an attached model: gathers its stream and side inputs, calls it, restores its stream.

- The family's `Stack` names the arguments, the forward's state has the rows.
- A compiled layer is routed outside the compiled code, which is then the dense model's code at one more length. Entry
  points of compiled code other than `forward` (`block.compile()`, `torch.compile(block)` in the list of layers) are
  wrapped at the model's next forward.
- In a model that is compiled whole, a checkpointed layer is routed outside the checkpoint, if the model's checkpoint
  function can be replaced, as diffusers' can: side effects inside a compiled checkpoint break the graph.
- One module may be several layers: a call runs the next of its indices.
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
from torch.utils import _pytree as pytree

from tread.around import Around
from tread.attach.family import Side, Stack
from tread.attach.rotary import FullLength
from tread.attach.wrappers import wrapped_in
from tread.kernels.checkpointing import recomputing
from tread.kernels.compiling import Attempt, Compiled, CompiledLayer, raise_recompile_limit
from tread.kernels.fast import SETTINGS, print_once_per_job
from tread.routing.handle import Handle
from tread.routing.state import End

STATIC = 3
"""Shapes of the stream with code of their own in layers that the user compiled; further ones share code, because torch
has a limit of 8 variants, and a stream with and without gradients are two."""
VARIANTS = 64
"""torch's limit for checkpointing within code that the user compiled: all classes of layers share one function."""
BOUND_BY_HOST = (
    "eager layers with checkpointing are bound by kernel launches, so routing gains little time on a GPU: add "
    "handle.compile() after tread.attach(...)."
)


class Layer(Around):
    """The wrapper of one module that is a layer, or several, of an attached model."""

    def __init__(self, handle: Handle, block: nn.Module, static: set[torch.Size]) -> None:
        super().__init__()
        self.handle, self.block = handle, block
        self._static = static
        """Shapes of the stream with code of their own in layers of this class that the user compiled."""
        self._indices: list[tuple[int, Stack, list[_Named]]] = []
        parameters = list(inspect.signature(type(block).forward).parameters)[1:]
        self._positions = {name: position for position, name in enumerate(parameters)}

    def add(self, index: int, stack: Stack) -> None:
        """Register the module as layer `index`."""
        self._indices.append((index, stack, [(side, *_split(side.name)) for side in stack.sides]))

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output, routed if the current forward is."""
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
        if isinstance(forward, Compiled) or hasattr(forward, "_torchdynamo_orig_callable"):
            self._fix_lengths(stack, args, kwargs)
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

    def _fix_lengths(self, stack: Stack, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let torch compile for the lengths of these arguments: left alone, the second length gets code for any."""
        if torch.compiler.is_compiling():
            return
        from torch._dynamo import mark_static  # takes a second to import

        shape = self._argument(stack.stream, args, kwargs).shape
        if shape not in self._static and len(self._static) >= STATIC:
            return
        self._static.add(shape)
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                mark_static(tensor)

    def advise_compiling(self, args: tuple[Any, ...]) -> None:
        """Say once how to make eager, checkpointed layers on a GPU fast: their step is bound by the host."""
        if self.handle.state.routed and any(isinstance(x, Tensor) and x.is_cuda for x in args):
            self.handle.warn([BOUND_BY_HOST])

    def follow_compile(self, module: nn.Module) -> None:
        """Wrap every entry point of compiled code of `module`, an item of the list of layers."""
        for owner, name in _compiled(module):
            if not isinstance(entry := owner.__dict__[name], CompiledCall):
                setattr(owner, name, CompiledCall(self, entry))

    def leave_compiled(self, module: nn.Module) -> None:
        """Unwrap the entry points of compiled code."""
        for owner, name in _compiled(module):
            if isinstance(entry := owner.__dict__[name], CompiledCall):
                setattr(owner, name, entry.inner)

    def _enter(
        self, index: int, stack: Stack, sides: list["_Named"], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the stream and its side inputs gathered."""
        state, given = self.handle.state, self._argument
        stream = given(stack.stream, args, kwargs)
        batch_first = _to_batch_first(stack, stream)
        entered = state.enter(index, batch_first, stack.image)
        if entered is batch_first and not state.inside:
            return args, kwargs
        changed: dict[str, Any] = {stack.stream: _to_layer_order(stack, entered, stream)}
        alone = stream.ndim == 2
        for side, name, entry in sides if state.inside else ():
            # a square mask has two token axes and two sides, which apply in turn
            value = changed[name] if name in changed else given(name, args, kwargs)
            if value is None:
                continue
            image = given(side.after, args, kwargs).shape[1] if side.after else side.image or stack.image
            if side.full:
                length = entered.shape[1] + state.dropped
                changed[name] = FullLength(value, state.rows(length, image), length, side.dim)
            elif not entry:
                changed[name] = self._side(side, value, side.name, image, alone)
            elif value.get(entry) is not None:
                changed[name] = {**value, entry: self._side(side, value[entry], side.name, image, alone)}
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

    def _side(self, side: Side, value: Any, name: str, image: End | int, alone: bool) -> Any:
        """A side input gathered, member by member; `alone`: the stream has no batch axis, nor has the result."""
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
            return self.handle.state.shortened(name, value, side.dim, image)
        rows = self.handle.state.side(name, value, side.dim, image)
        return rows.squeeze(0) if (alone or side.shared) and rows is not None else rows


@_disable_dynamo
def _uncompiled(layer: Layer, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Layer.call` outside the graph: compiled, the two passes of a checkpoint would save different tensors."""
    return layer.call(forward, args, kwargs)


_Named = tuple[Side, str, str]
"""A side input, the argument that holds it, and the entry of that argument if it is a mapping, else ""."""


class CompiledCall:
    """An entry point of a layer's compiled code, with routing outside it."""

    def __init__(self, layer: Layer, inner: Any) -> None:
        self.layer, self.inner = layer, inner
        self._checkpointed: Compiled | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) if self.layer.quiet else self.layer.call(self.inner, args, kwargs)

    def checkpointed(self, around: Callable[..., Any]) -> Callable[..., Any] | None:
        """The same code with checkpointing inside it, which costs the host far less than `around`, torch's checkpoint
        around the code; None if there is none."""
        if isinstance(self.inner, CompiledLayer):
            return None if self.inner.attempt.failed or self.inner.checkpointed is False else self.inner.checkpoint
        if self._checkpointed is None and (compile_alike := compiler_of(self.inner)) is not None:
            SETTINGS.enter(self.layer.handle)
            raise_recompile_limit(VARIANTS)
            code = compile_alike(partial(recomputing(True, compiled=True), self.inner._torchdynamo_orig_callable))
            self._checkpointed = Compiled(around, code, Attempt(print_once_per_job))
        code = self._checkpointed
        return None if code is None or code.attempt.failed else code

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)


class CheckpointCall:
    """A model's checkpoint function.

    - A compiled layer is checkpointed within its compiled code, if the function is diffusers' own.
    - In a model that is compiled whole, routing is outside the checkpoint.
    """

    def __init__(self, layers: Mapping[nn.Module, Layer], inner: Any) -> None:
        self.layers, self.inner = layers, inner
        self._stock = getattr(inner, "__module__", "").startswith("diffusers.")

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        module = getattr(block, "__self__", block)  # some models pass `block.__call__`
        if (layer := self.layers.get(module)) is None:
            return self.inner(block, *args, **kwargs)
        if torch.compiler.is_compiling():
            return layer.call(partial(self.inner, block), args, kwargs)
        entry = module.__dict__.get("_compiled_call_impl")
        if not isinstance(entry, CompiledCall):
            layer.advise_compiling(args)
        elif self._stock and (code := entry.checkpointed(partial(self.inner, block))) is not None:
            return layer.call(code, args, kwargs)
        return self.inner(block, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)


def compiler_of(function: Any) -> Callable[[Callable[..., Any]], Any] | None:
    """A function that compiles others as torch.compile compiled this one, settings included; None if torch hides it."""
    if not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    from torch._dynamo.eval_frame import OptimizeContext  # takes a second to import

    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return next((one for one in held if isinstance(one, OptimizeContext)), None)


def _compiled(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The attributes of `module` and what it wraps that enter compiled code before a layer's `forward`."""
    owners = [module, *wrapped_in(module)]
    for owner in owners:
        if owner.__dict__.get("_compiled_call_impl") is not None:
            yield owner, "_compiled_call_impl"
    for owner in owners[:-1]:
        if "forward" in owner.__dict__:  # of torch.compile(module)
            yield owner, "forward"


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


def _split(name: str) -> tuple[str, str]:
    """The name of an argument, and of its entry if it is a mapping, else ""."""
    argument, _, entry = name.partition(".")
    return argument, entry
