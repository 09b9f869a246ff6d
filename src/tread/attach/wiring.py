"""The wrappers that route a model: around its forward and its layers', its checkpoint function, its rotary functions.

They are put on and taken off together, and follow what a user changes on the model in between: layers that are
compiled, checkpointing that is switched on again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from torch import nn
from torch.compiler import is_compiling

from tread.around import Around, around, is_patched
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
    """All wrappers of one attached model; `call` is the one around its forward.

    A shallow copy of the model, such as accelerate's regional compilation makes, shares them and is followed too.
    """

    def __init__(self, handle: Handle, model: nn.Module, family: Family, call: Around) -> None:
        self._handle, self._family, self._call = handle, family, call
        self._models = [model]
        """The attached model and its shallow copies that were called."""
        self.layers: dict[nn.Module, Layer] = {}
        """Module -> its wrapper."""
        static = defaultdict[type, StaticShapes](lambda: StaticShapes(handle))
        for index, (stack, module) in enumerate(layer_modules(model, family)):
            block = unwrapped(module)
            self.layers.setdefault(block, Layer(handle, block, static[type(block)])).add(index, stack)

    @property
    def is_on(self) -> bool:
        """Whether the model is wrapped by this."""
        return around(self._models[0]) is self._call

    @property
    def is_replaced(self) -> bool:
        """Whether the model is wrapped by another handle's."""
        return any(around(model) not in (None, self._call) for model in self._models)

    def install_rotary(self) -> None:
        """Wrap the family's rotary functions; raises if one is not the function that the family describes."""
        for stock in self._family.rotary:
            rotary.install(stock, self._handle)

    def put_on(self) -> None:
        """Wrap everything else."""
        for model in self._models:
            self._call.put_on(model)
        for block, layer in self.layers.items():
            layer.put_on(block)
        for model in self._models:
            self.follow(model)

    def put_on_again(self) -> Callable[[], None]:
        """Wrap a model that is another handle's or nobody's by now; returns a function that undoes it."""
        others = [(one, module) for module in (*self._models, *self.layers) if (one := around(module)) is not None]
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
        for model in self._models:
            if isinstance(function := model.__dict__.get(_CHECKPOINT), CheckpointCall):
                model.__dict__[_CHECKPOINT] = function.inner
            self._call.take_off(model)
        for block, layer in self.layers.items():
            layer.take_off(block)
        for stock in self._family.rotary:
            rotary.remove(stock, self._handle)

    def follow(self, model: nn.Module) -> None:
        """Follow what changed since the last forward of `model`; raises if a layer is another module."""
        self._wrap_checkpointing(model)
        if is_compiling():
            return
        self.include(model)
        self.follow_patches()
        for index, module in enumerate(self._modules(model)):
            layer = self.layers.get(unwrapped(module))
            if layer is None:
                raise ConfigError(
                    f"layer {index} is another module ({type(module).__name__}) than when the model was attached: "
                    "attach it again."
                )
            follow_compile(layer, module)

    def include(self, model: nn.Module) -> None:
        """Count `model`, a shallow copy of the attached one, as attached."""
        if model not in self._models:
            self._models.append(model)

    def follow_patches(self) -> None:
        """Wrap what others replaced since: rotary functions, and `forward` on the class of a model or layer."""
        self.install_rotary()
        if all(map(is_patched, {type(module) for module in (*self._models, *self.layers)})):
            return
        wrappers = [*((model, self._call) for model in self._models), *self.layers.items()]
        for module, wrapper in wrappers:
            if around(module) is wrapper:
                wrapper.put_on(module)

    def check_layers(self) -> None:
        """Raise if a layer is not wrapped by this: another model that shares it was attached since."""
        for layer in self.layers.values():
            if around(layer.block) is not layer:
                raise ConfigError(
                    f"a {type(layer.block).__name__} of this model is a layer of another one that was attached later. "
                    "Models that share layers are routed one at a time: detach the other, then attach this one again."
                )

    def leave_compiled(self) -> None:
        """Unwrap the entry points of compiled layers."""
        for module in (module for model in self._models for module in self._modules(model)):
            if unwrapped(module) in self.layers:
                leave_compiled(module)

    def _modules(self, model: nn.Module) -> Iterator[nn.Module]:
        return (module for _, module in layer_modules(model, self._family))

    def _wrap_checkpointing(self, model: nn.Module) -> None:
        """Wrap a model's checkpoint function, which switching checkpointing on again overwrites."""
        function = getattr(model, _CHECKPOINT, None)
        if function is not None and not isinstance(function, CheckpointCall):
            model.__dict__[_CHECKPOINT] = CheckpointCall(self.layers, function)
