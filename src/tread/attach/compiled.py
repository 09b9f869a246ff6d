"""Layers that are compiled: routing goes outside compiled code, checkpointing inside it.

- The compiled code is then the dense model's code at one more length. Entry points of compiled code other than
  `forward` (`block.compile()`, `torch.compile(block)` in the list of layers) are wrapped at the model's next forward.
- torch's checkpointing around compiled code would cost the host more than routing saves the device; within it, it costs
  nothing.
- In a model that is compiled whole, a checkpointed layer is routed outside the checkpoint, if the model's checkpoint
  function can be replaced, as diffusers' can: side effects inside a compiled checkpoint break the graph.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tread.around import module_of
from tread.attach.layer import Layer
from tread.attach.wrappers import wrapped_in
from tread.kernels.checkpointing import recomputing
from tread.kernels.compiling import Attempt, Compiled, CompiledLayer
from tread.kernels.fast import print_once_per_job
from tread.kernels.offload.call import OffloadedCall, recomputes

BOUND_BY_HOST = (
    "eager layers with checkpointing are bound by kernel launches, so routing gains little time on a GPU: add "
    "handle.compile() after tread.attach(...)."
)


def follow_compile(layer: Layer, module: nn.Module) -> None:
    """Wrap every entry point of compiled code of `module`, an item of the list of layers."""
    for owner, name in _entry_points(module):
        entry = owner.__dict__[name]
        if isinstance(entry, CompiledCall):
            if entry.layer is layer:
                continue
            entry = entry.inner  # that of a later handle, while a forward of this one is recomputed
        setattr(owner, name, CompiledCall(layer, entry))


def leave_compiled(module: nn.Module) -> None:
    """Unwrap the entry points of compiled code."""
    for owner, name in _entry_points(module):
        if isinstance(entry := owner.__dict__[name], CompiledCall):
            setattr(owner, name, entry.inner)


class CompiledCall:
    """An entry point of a layer's compiled code, with routing outside it."""

    def __init__(self, layer: Layer, inner: Any) -> None:
        self.layer, self.inner = layer, inner
        self._checkpointed: Compiled | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        return self.inner(*args, **kwargs) if layer.quiet else layer.call(layer.block, self.inner, args, kwargs)

    def checkpointed(self, around: Callable[..., Any]) -> Callable[..., Any] | None:
        """The same code compiled with checkpointing inside, which costs the host far less than `around`, torch's
        checkpoint around the code; None if it cannot be compiled so."""
        inner: Any = self.inner.code if isinstance(self.inner, OffloadedCall) else self.inner
        if isinstance(inner, CompiledLayer):
            return None if inner.attempt.failed or inner.checkpointed is False else inner.checkpoint
        if self._checkpointed is None and (compile_alike := compiler_of(inner)) is not None:
            code = compile_alike(partial(recomputing(True, compiled=True), inner._torchdynamo_orig_callable))
            self._checkpointed = Compiled(around, code, Attempt(print_once_per_job))
        code = self._checkpointed
        return None if code is None or code.attempt.failed else code

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)


class CheckpointCall:
    """The wrapper of a model's checkpoint function.

    - A compiled layer is checkpointed within its compiled code, if the function is diffusers' own.
    - In a model that is compiled whole, routing is outside the checkpoint.
    """

    def __init__(self, layers: Mapping[nn.Module, Layer], inner: Any) -> None:
        self.layers, self.inner = layers, inner
        self._stock = getattr(inner, "__module__", "").startswith("diffusers.")

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        module = module_of(block)
        if (layer := self.layers.get(module)) is None:
            return self.inner(block, *args, **kwargs)
        if recomputes(module):
            return block(*args, **kwargs)
        if torch.compiler.is_compiling():
            return layer.call(module, partial(self.inner, block), args, kwargs)
        entry = module.__dict__.get("_compiled_call_impl")
        if not isinstance(entry, CompiledCall):
            _advise_compiling(layer, args)
        elif self._stock and (code := entry.checkpointed(partial(self.inner, block))) is not None:
            return layer.call(module, code, args, kwargs)
        return self.inner(block, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.inner, memo)


def compiler_of(function: Any) -> Callable[[Callable[..., Any]], Any] | None:
    """A function that compiles others as torch.compile compiled this one, options included; None if it was not compiled
    or its options cannot be read."""
    if not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    from torch._dynamo.eval_frame import OptimizeContext  # takes a second to import

    contents = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    return next((content for content in contents if isinstance(content, OptimizeContext)), None)


def _entry_points(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The attributes, of `module` and of the modules it wraps, that are called in place of a layer's `forward` and run
    compiled code: the owner of each, and its name."""
    owners = [module, *wrapped_in(module)]
    for owner in owners:
        if owner.__dict__.get("_compiled_call_impl") is not None:
            yield owner, "_compiled_call_impl"
    for owner in owners[:-1]:
        if "forward" in owner.__dict__:  # set by torch.compile(module)
            yield owner, "forward"


def _advise_compiling(layer: Layer, args: tuple[Any, ...]) -> None:
    """Say once how to make eager, checkpointed layers on a GPU fast."""
    if layer.handle.state.routed and any(isinstance(x, Tensor) and x.is_cuda for x in args):
        layer.handle.warn([BOUND_BY_HOST])
