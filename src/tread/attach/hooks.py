"""When a layer of a stock model is routed: around its call, outside what runs the call again or compiles it.

- Plain torch hooks on the layer gather before it and restore after it.
- Activation checkpointing: routing happens outside it. The model's pluggable checkpoint function is wrapped, so the
  recomputation in backward receives tensors that were gathered already and runs the bare layer.
- Compiled layers: routing happens outside them too. A compiled layer has its hooks moved to the call itself, so the
  compiled code is the dense model's, at one more length.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from tread.attach.family import Stack
from tread.attach.layer import Attached, Layer


class HookedLayer(Layer):
    """A layer that is routed when the model calls it."""

    def __init__(self, handle: Attached, block: nn.Module, stack: Stack, index: int) -> None:
        super().__init__(handle, block, stack, index)
        self.quiet = False
        self._hooks: list[Any] = [
            block.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            block.register_forward_hook(self._after),
        ]

    def _before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if self.quiet or not self.handle.state.routed else self.enter(args, kwargs)

    def _after(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if self.quiet or not self.handle.state.routed else self.exit(output)

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

    def bare(self, *args: Any, **kwargs: Any) -> Any:
        """The layer without routing."""
        self.quiet = True
        try:
            return self.block(*args, **kwargs)
        finally:
            self.quiet = False


class Checkpointing:
    """A model's checkpoint function, with routing outside it."""

    def __init__(self, handle: Attached, layers: Sequence[HookedLayer], inner: Any) -> None:
        self.handle, self.inner = handle, inner
        self._layers = {layer.block: layer for layer in layers}

    def __call__(self, block: Any, *args: Any, **kwargs: Any) -> Any:
        # some models hand over `block.__call__`
        layer = self._layers.get(getattr(block, "__self__", block))
        if layer is None or block not in (layer.block, layer.block.__call__) or not self.handle.state.routed:
            return self.inner(block, *args, **kwargs)
        args, kwargs = layer.enter(args, kwargs)
        return layer.exit(self.inner(_Bare(layer), *args, **kwargs))


class _Bare:
    """What a checkpoint function is given in the place of a layer: it calls `module.__call__`."""

    def __init__(self, layer: HookedLayer) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.bare(*args, **kwargs)


class CompiledCall:
    """A compiled layer's call, with routing outside it."""

    def __init__(self, layer: HookedLayer, inner: Any) -> None:
        self.layer, self.inner = layer, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        if layer.quiet or not layer.handle.state.routed:
            return self.inner(*args, **kwargs)
        args, kwargs = layer.enter(args, kwargs)
        return layer.exit(self.inner(*args, **kwargs))
