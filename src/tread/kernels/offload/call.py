"""The call of an offloaded layer: its weights are fetched for the forward, and again for the backward.

- Kernels save weights for backward, some of them out of autograd's sight (bitsandbytes), and by then the slot holds
  another layer, which no version counter would notice. So a layer is one autograd function that saves its inputs only;
  backward runs the layer again and takes its gradients while the weights are there. So offloading implies
  checkpointing, also of a layer that "auto" moved back to the device: it measured the memory of a checkpointed step.
- Trained parameters (an adapter's) are inputs of that function, so autograd, its hooks and DDP see them as usual.
- The recomputation has the forward's random numbers, autocast and routing (`recomputed.py`). Compiled code runs with
  gradients enabled both times, so that one compiled graph serves both.
- The call is the layer's `_compiled_call_impl`, compiled or not. Routing wraps it as it wraps compiled code, so the
  function sees the tokens that were kept.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from tread.around import module_of
from tread.errors import ConfigError
from tread.kernels.nests import Whole, taken_apart
from tread.kernels.offload.host import HostLayer
from tread.kernels.offload.recomputed import HiddenInputs, leaves_of
from tread.kernels.offload.ring import Pass, Ring
from tread.routing.recompute import Region

_calls: WeakKeyDictionary[nn.Module, ref["OffloadedCall"]] = WeakKeyDictionary()
"""Layer -> its call; a weak reference, because the call holds the layer."""
_CODE = "_compiled_call_impl"
"""The attribute of a module that is called in place of its `forward` and hooks."""


class Owner(Protocol):
    """The part of `Offload` that a call uses."""

    ring: Ring

    def begin(self) -> None:
        """Called before a forward with gradients."""


def _call_of(layer: nn.Module) -> "OffloadedCall | None":
    reference = _calls.get(layer)
    return None if reference is None else reference()


def is_offloaded(layer: nn.Module) -> bool:
    """Whether the weights of a layer are in host memory."""
    call = _call_of(layer)
    return call is not None and call.host is not None


def recomputes(layer: nn.Module) -> bool:
    """Whether a layer recomputes itself in backward, because it is or was offloaded."""
    return _call_of(layer) is not None


def compiled_code(layer: nn.Module) -> Callable[..., Any] | None:
    """The compiled code of a layer, offloaded or not; None if it runs eager."""
    call = _call_of(layer)
    return layer.__dict__.get(_CODE) if call is None else call.code


def set_compiled_code(layer: nn.Module, code: Callable[..., Any] | None) -> None:
    """Let a layer run compiled code, or eager if it is None."""
    if (call := _call_of(layer)) is not None:
        call.code = code
    elif code is not None:
        layer._compiled_call_impl = code
    else:
        layer.__dict__.pop(_CODE, None)


def unless_offloaded(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint function `(layer, *args)` that calls layers which recompute themselves without checkpointing."""

    def call(block: Any, *args: Any, **kwargs: Any) -> Any:
        return block(*args, **kwargs) if recomputes(module_of(block)) else checkpoint(block, *args, **kwargs)

    return call


class OffloadedCall:
    """Calls `layer` with the weights of `host`, fetched into the owner's ring."""

    def __init__(self, layer: nn.Module, host: HostLayer, owner: Owner) -> None:
        self.layer, self._owner = layer, owner
        self.host: HostLayer | None = host
        """None: the layer has its weights on the device again."""
        self.code = compiled_code(layer)
        """Compiled code of the layer; None: it runs eager."""
        self._checked = False
        layer._compiled_call_impl = self
        _calls[layer] = ref(self)

    def remove(self) -> None:
        """Call the layer as before."""
        self.host = None
        del _calls[self.layer]
        set_compiled_code(self.layer, self.code)

    @_disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            with self.visit("inference"):
                return self.run(args, kwargs)
        self._owner.begin()
        trained = [parameter for parameter in self.layer.parameters() if parameter.requires_grad]
        if self.host is not None and any(id(parameter) in self.host.ids for parameter in trained):
            raise ConfigError(
                "weights of an offloaded layer were unfrozen, and only frozen ones can be offloaded: freeze them, or "
                "offload after unfreezing."
            )
        given, arguments = taken_apart((args, kwargs))
        passes = _Passes(self, trained, given, arguments)
        made = _Function.apply(passes, *trained, *given)
        return passes.output(made)  # pyright: ignore[reportArgumentType]

    def visit(self, how: Pass) -> AbstractContextManager[None]:
        """Inside, the layer has its weights on the device."""
        return nullcontext() if self.host is None else self._owner.ring.visit(how, self.host)

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The output of the layer, not checkpointed."""
        code = self.layer._call_impl if self.code is None else getattr(self.code, "plain", self.code)
        return code(*args, **kwargs)

    def check(self, outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """Refuse, in the first backward, a layer that trains parameters which are not its own."""
        strange = None if self._checked else next(leaves_of(outputs, known), None)
        if strange is not None:
            raise ConfigError(
                f"the offloaded {type(self.layer).__name__} computes with a trained tensor of shape "
                f"{tuple(strange.shape)} that is neither its argument nor its parameter, as lycoris adapters are: "
                "leave offload out, or use an adapter of peft."
            )
        self._checked = True

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copied layer is not offloaded."""


class _Passes:
    """The two passes of one call of an offloaded layer: its forward, and its recomputation in backward."""

    def __init__(
        self, call: OffloadedCall, trained: Sequence[Tensor], given: Sequence[Tensor], arguments: Whole
    ) -> None:
        self._call, self._trained, self._arguments = call, list(trained), arguments
        self.count = len(trained)
        """The number of trained parameters, which come first among the tensors."""
        self._region, self._hidden = Region(reentrant=False), HiddenInputs(given)
        self.output = arguments
        """Makes the layer's output from its tensors; set by `forward`."""

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of the layer's output, without an autograd graph."""
        enabled = self._call.code is not None
        self._region.begin()
        try:
            with torch.set_grad_enabled(enabled), self._call.visit("forward"):
                made, self.output = taken_apart(self._run(_detached(tensors[self.count :])))
        finally:
            self._region.end()
        return tuple(x.detach() for x in made)

    def backward(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the trained parameters and of the tensors in the arguments; None for those without."""
        return self._region.recompute(self._gradients, _detached(tensors), gradients)

    def _gradients(self, given: list[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        inputs = [*self._trained, *given]
        wanted = [x for x in inputs if x.requires_grad]
        with torch.enable_grad(), self._hidden.restored(), self._call.visit("backward"):
            made = taken_apart(self._run(given))[0]
            pairs = [(x, g) for x, g in zip(made, gradients, strict=True) if g is not None and x.requires_grad]
            if not pairs:
                return [None] * len(inputs)
            outputs, weights = [x for x, _ in pairs], [g for _, g in pairs]
            self._call.check(outputs, wanted)
            computed = iter(torch.autograd.grad(outputs, wanted, weights, allow_unused=True))
            return [next(computed) if x.requires_grad else None for x in inputs]

    def _run(self, tensors: Sequence[Tensor]) -> Any:
        args, kwargs = self._arguments(tensors)
        return self._call.run(args, kwargs)


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as leaves of a new autograd graph."""
    return [x.detach().requires_grad_(x.requires_grad) for x in tensors]


class _Function(torch.autograd.Function):
    """An offloaded layer in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, passes: _Passes, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[passes.count :])
        made = passes.forward(tensors)
        ctx.mark_non_differentiable(*(x for x in made if not (x.is_floating_point() or x.is_complex())))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *ctx.passes.backward(ctx.saved_tensors, gradients)
