"""`attach`: routing on an unmodified model, through plain torch hooks.

- A hook on the model opens a state for each forward; hooks on the layers gather and restore around them. Parameter
  names, `save_pretrained`, adapters and wrappers never notice; `detach` leaves no trace.
- Activation checkpointing: routing happens outside it. The model's pluggable checkpoint function is wrapped, so the
  recomputation in backward receives tensors that were gathered already and runs the bare layer.
- Compiled layers: routing happens outside them too. A compiled layer has its hooks moved to the call itself, so the
  compiled code is the dense model's, at one more length.
- This is the only file that touches stock models.
"""

import inspect
import operator
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tread.attach import rotary
from tread.attach.family import Arguments, Family, Side, Stack
from tread.attach.registry import family_of
from tread.routing.errors import ConfigError
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.routing.state import State, Where

_KEY = "_tread_attachment"
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "PeftModel": "base_model.model",
}
"""Where torch.compile, torch's data parallelism and peft hold the model they wrap."""
_REFERENCES = (
    "the force mask does not cover just the target's tokens, or there are not as many reference tokens as in an "
    "earlier forward with as many tokens: give a mask of the target's (B, S), or set handle.references before each "
    "forward."
)


def attach(
    model: nn.Module,
    config: RoutePlan | Mapping[str, Any] | str | Path,
    *,
    seed: int | None = None,
    family: Family | None = None,
) -> "Attachment":
    """Route `model` by `config` from its next training forward on; `seed` replaces the config's.

    `family` says how a model of your own calls its layers; stock models are known, inside wrappers too. A second
    `attach` replaces the first. The handle is a context manager that detaches at the end.
    """
    model = _unwrapped(model)
    family = family_of(model) if family is None else family
    return Attachment(model, RoutePlan.from_config(config), family, seed=seed)


def _unwrapped(model: nn.Module) -> nn.Module:
    while path := next((_WRAPPERS[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in _WRAPPERS), None):
        model = operator.attrgetter(path)(model)
    return model


class Attachment(Handle):
    """The handle of an attached model."""

    def __init__(self, model: nn.Module, plan: RoutePlan, family: Family, *, seed: int | None = None) -> None:
        found = [(stack, block) for stack in family.stacks for block in operator.attrgetter(stack.name)(model)]
        super().__init__(plan, depth=len(found), seed=seed)
        for index, (_, block) in enumerate(found):
            _check_not_wrapped(block, index)
        for stock in family.rotary:
            rotary.install(stock, self)
        if (attached := model.__dict__.get(_KEY)) is not None:  # nothing can be refused from here on
            attached.detach()
        self.model, self.family = model, family
        self.state = State()
        self.references: int | None = None
        """The number of reference tokens; None: read from the inputs, once per number of tokens."""
        self._references: dict[int, int] = {}
        self.layers = [Layer(self, block, stack, index) for index, (stack, block) in enumerate(found)]
        self._parameters = list(inspect.signature(type(model).forward).parameters)[1:]
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        self._wrap_checkpointing(model)
        model.__dict__[_KEY] = self

    def detach(self) -> None:
        """Take routing off; the model is as it was."""
        if self.model.__dict__.get(_KEY) is not self:
            return
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers:
            layer.detach()
        if isinstance(function := self.model.__dict__.get("_gradient_checkpointing_func"), Checkpointing):
            self.model.__dict__["_gradient_checkpointing_func"] = function.inner
        for stock in self.family.rotary:
            rotary.remove(stock, self)
        del self.model.__dict__[_KEY]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied model is attached too: it needs the rotary functions as long as it lives."""
        self.__dict__.update(state)
        for stock in self.family.rotary:
            rotary.install(stock, self)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open the state of one forward."""
        family = self.family
        self._wrap_checkpointing(model)
        for layer in self.layers:
            layer.follow_compile()
        if not self.is_on(training=model.training):
            self.state = self.begin(training=model.training)
            return
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs
        tokens = None if family.tokens is None else family.tokens(model, arguments)
        references = self._count_references(model, arguments, tokens)
        pinned = 0 if family.pinned is None else family.pinned(model, arguments)
        self.state = state = self.begin(
            training=model.training, references=references, references_at=family.references_at, pinned=pinned
        )
        if family.refuse is not None and (reason := family.refuse(model, arguments)):
            raise ConfigError(f"{type(model).__name__} cannot be routed in this forward: {reason}")
        state.tokens = tokens
        if family.offset is not None:
            state.offset = family.offset(model, arguments)
        state.per_block = family.per_block or any(arguments.get(name) is not None for name in family.residuals)

    def _count_references(self, model: nn.Module, arguments: Arguments, tokens: int | None) -> int:
        """How many tokens are reference tokens that must stay.

        Where the inputs say it by a tensor, reading that waits for the device, so it happens once per number of tokens;
        or a force mask says it, which covers the target's tokens only. The device checks it in every forward, without
        a wait.
        """
        if self.family.references is None or self.plan.reference_tokens == "route" or tokens is None:
            return 0
        if self.references is not None:
            return self.references
        found = self.family.references(model, arguments)
        if not isinstance(found, Tensor):
            return found
        mask = self._mode.mask
        if mask is not None and mask.shape[1] > tokens:
            raise ConfigError(f"force_keep has shape {tuple(mask.shape)}; this forward has {tokens} tokens.")
        count = self._references.get(tokens) if mask is None else tokens - mask.shape[1]
        if count is None:
            count = _read(found)
            if not torch.compiler.is_compiling():  # a change seen by compiled code would compile it again
                self._references[tokens] = count
        torch._assert_async(found == count, _REFERENCES)  # pyright: ignore[reportPrivateImportUsage]
        return count

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Drop the state with the forward, after an error too: it holds tensors, and recomputations would see it."""
        state, self.state = self.state, State()
        if state.inside and output is not None:
            raise ConfigError("the forward ended inside a window of routing: the model skipped its last layers.")

    def _wrap_checkpointing(self, model: nn.Module) -> None:
        """Re-enabling checkpointing overwrites the function, so look at every forward."""
        function = getattr(model, "_gradient_checkpointing_func", None)
        if function is not None and not isinstance(function, Checkpointing):
            model.__dict__["_gradient_checkpointing_func"] = Checkpointing(self, function)


def _check_not_wrapped(block: nn.Module, index: int) -> None:
    if type(block).__name__ == "CheckpointWrapper":
        raise ConfigError(
            f"layer {index} is inside torch's checkpoint_wrapper, whose recomputation would route a second time. "
            "Use the model's own enable_gradient_checkpointing() instead."
        )


@torch.compiler.assume_constant_result
def _read(count: Tensor) -> int:
    """The value of a count on the device; a constant in compiled code."""
    return int(count)


class Layer:
    """One layer of an attached model."""

    def __init__(self, handle: Attachment, block: nn.Module, stack: Stack, index: int) -> None:
        self.handle, self.block, self.stack, self.index = handle, block, stack, index
        parameters = list(inspect.signature(type(block).forward).parameters)[1:]
        self._places = {name: place for place, name in enumerate(parameters)}
        self._sides = [(side, *_split(side.name), repr(side)) for side in stack.sides]
        self.quiet = False
        self._hooks = self._register()

    def _register(self) -> list[Any]:
        return [
            self.block.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            self.block.register_forward_hook(self._after),
        ]

    def detach(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        call = self.block.__dict__.get("_compiled_call_impl")
        if isinstance(call, CompiledCall):
            self.block._compiled_call_impl = call.inner

    def follow_compile(self) -> None:
        """Move from hooks to the call, where the layer has been compiled since the last forward."""
        call = self.block.__dict__.get("_compiled_call_impl")
        if call is not None and not isinstance(call, CompiledCall):
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self.block._compiled_call_impl = CompiledCall(self, call)

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
            if not entry:
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

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An argument of the layer by name; None where it was not given."""
        if name in kwargs:
            return kwargs[name]
        place = self._places.get(name, len(args))
        return args[place] if place < len(args) else None

    def _gathered(self, side: Side, key: str, value: Any, image: Where | int, alone: bool) -> Any:
        """A side input for the tokens in the stream: looked at once per window, where the model passes one object."""
        done, where = self.handle.state.done, (key, image, alone)
        if where not in done or done[where][0] is not value:
            done[where] = value, self._side(side, value, side.name, image, alone)
        return done[where][1]

    def exit(self, output: Any) -> Any:
        """The layer's output with the stream restored where a window ends."""
        state, place = self.handle.state, self.stack.returns
        given, inside = output if place is None else output[place], state.inside
        stream = self._turned_back(state.exit(self.index, self._turned(given), self.stack.image), given)
        if place is None:
            return stream
        others = [*output[:place], *output[place + 1 :]]
        if inside and not state.inside:
            # text cut from a joined tensor would keep that alive, and has strides no dense forward was compiled for
            # (a clone, because one sample's cut counts as contiguous whatever its strides)
            layout = torch.contiguous_format
            others = [item.clone(memory_format=layout) if isinstance(item, Tensor) else item for item in others]
        return (*others[:place], stream, *others[place:])

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

    def _side(self, side: Side, value: Any, name: str, image: Where | int, alone: bool) -> Any:
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

    def _before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self.quiet or not self.handle.state.routed else self.enter(args, kwargs)

    def _after(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if self.quiet or not self.handle.state.routed else self.exit(output)

    def bare(self, *args: Any, **kwargs: Any) -> Any:
        """The layer without routing."""
        self.quiet = True
        try:
            return self.block(*args, **kwargs)
        finally:
            self.quiet = False


def _split(name: str) -> tuple[str, str]:
    """The name of an argument, and the entry of it where it is a mapping."""
    argument, _, entry = name.partition(".")
    return argument, entry


class Checkpointing:
    """A model's checkpoint function, with routing outside it."""

    def __init__(self, handle: Attachment, inner: Any) -> None:
        self.handle, self.inner = handle, inner
        self._layers = {layer.block: layer for layer in handle.layers}

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        # some models hand over `block.__call__`
        layer = self._layers.get(getattr(block, "__self__", block))
        if layer is None or block not in (layer.block, layer.block.__call__) or not self.handle.state.routed:
            return self.inner(block, *args, **kwargs)
        args, kwargs = layer.enter(args, kwargs)
        return layer.exit(self.inner(_Bare(layer), *args, **kwargs))


class _Bare:
    """What a checkpoint function is given in the place of a layer: it calls `module.__call__`."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.bare(*args, **kwargs)


class CompiledCall:
    """A compiled layer's call, with routing outside it."""

    def __init__(self, layer: Layer, inner: Any) -> None:
        self.layer, self.inner = layer, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        if layer.quiet or not layer.handle.state.routed:
            return self.inner(*args, **kwargs)
        args, kwargs = layer.enter(args, kwargs)
        return layer.exit(self.inner(*args, **kwargs))
