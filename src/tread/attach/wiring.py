"""The wrappers that route a model: around its forward and its layers', its checkpoint function, its rotary functions.

They are put on and taken off together, and follow what a user changes on the model in between: layers that are
compiled, checkpointing that is switched on again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from torch import nn
from torch.compiler import is_compiling

from tread.around import Around, around
from tread.attach import rotary
from tread.attach.compiled import CheckpointCall, follow_compile, leave_compiled
from tread.attach.family import Family, Stack
from tread.attach.layer import Layer
from tread.attach.static import StaticShapes
from tread.attach.wrappers import unwrapped
from tread.errors import ConfigError
from tread.routing.handle import Handle

_CHECKPOINT = "_gradient_checkpointing_func"
"""The attribute that holds the checkpoint function of diffusers' models."""


def layer_modules(model: nn.Module, family: Family) -> list[tuple[Stack, nn.Module]]:
    """The items of a model's lists of layers as they are now, wrappers included, each with its stack."""
    return [(stack, module) for stack in family.stacks for module in stack.layers(model)]


class Wiring:
    """All wrappers of one attached model; `call` is the one around its forward."""

    def __init__(self, handle: Handle, model: nn.Module, family: Family, call: Around) -> None:
        self._handle, self._model, self._family, self._call = handle, model, family, call
        self.layers: dict[nn.Module, Layer] = {}
        """Module -> its wrapper."""
        static = defaultdict[type, StaticShapes](lambda: StaticShapes(handle))
        for index, (stack, module) in enumerate(layer_modules(model, family)):
            block = unwrapped(module)
            self.layers.setdefault(block, Layer(handle, block, static[type(block)])).add(index, stack)

    @property
    def is_on(self) -> bool:
        """Whether the model is wrapped by this."""
        return around(self._model) is self._call

    @property
    def is_replaced(self) -> bool:
        """Whether the model is wrapped by another handle's."""
        return around(self._model) not in (None, self._call)

    def install_rotary(self) -> None:
        """Wrap the family's rotary functions; raises if one is not the function that the family describes."""
        for stock in self._family.rotary:
            rotary.install(stock, self._handle)

    def put_on(self) -> None:
        """Wrap everything else."""
        self._call.put_on(self._model)
        for block, layer in self.layers.items():
            layer.put_on(block)
        self.follow()

    def put_on_again(self) -> Callable[[], None]:
        """Wrap a model that is another handle's or nobody's by now; returns a function that undoes it."""
        others = [(one, module) for module in (self._model, *self.layers) if (one := around(module)) is not None]
        self.install_rotary()
        self.put_on()

        def undo() -> None:
            self.take_off()
            for one, module in others:
                one.put_on(module)

        return undo

    def take_off(self) -> None:
        """Remove every wrapper."""
        self.leave_compiled()
        if isinstance(function := self._model.__dict__.get(_CHECKPOINT), CheckpointCall):
            self._model.__dict__[_CHECKPOINT] = function.inner
        self._call.take_off(self._model)
        for block, layer in self.layers.items():
            layer.take_off(block)
        for stock in self._family.rotary:
            rotary.remove(stock, self._handle)

    def follow(self) -> None:
        """Follow what changed since the last forward; raises if a layer is another module."""
        self._wrap_checkpointing()
        if is_compiling():
            return
        for index, module in enumerate(self._modules()):
            layer = self.layers.get(unwrapped(module))
            if layer is None:
                raise ConfigError(
                    f"layer {index} is another module ({type(module).__name__}) than when the model was attached: "
                    "attach it again."
                )
            follow_compile(layer, module)

    def leave_compiled(self) -> None:
        """Unwrap the entry points of compiled layers."""
        for module in self._modules():
            if unwrapped(module) in self.layers:
                leave_compiled(module)

    def _modules(self) -> Iterator[nn.Module]:
        return (module for _, module in layer_modules(self._model, self._family))

    def _wrap_checkpointing(self) -> None:
        """Wrap the model's checkpoint function, which switching checkpointing on again overwrites."""
        function = getattr(self._model, _CHECKPOINT, None)
        if function is not None and not isinstance(function, CheckpointCall):
            self._model.__dict__[_CHECKPOINT] = CheckpointCall(self.layers, function)
