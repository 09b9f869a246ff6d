"""`torch.compile` for the layers of a model, one by one, and for the noise of a step.

- Shapes are static. Routing adds sequence lengths to the dense one, a number that the plan determines; torch's
  recompile limit, beyond which it would silently run eager code, is raised to it. A layer that meets more shapes than
  expected gets code for any shape, and one message says so.
- If compiling fails (no C compiler, an unsupported operation), every layer runs eager from then on; one message says
  so. The backward is compiled together with the forward, so that no step fails halfway.
- Checkpointing is compiled with the layer (`checkpointing.py`). Torch's checkpointing around compiled code would cost
  the host more time than routing saves the device (docs/performance.md).
- A layer keeps its parameter names and its hooks. A sharded layer (FSDP2) is checkpointed around its compiled code,
  where `selective` recomputes everything.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tread.kernels.checkpointing import Checkpointing, Recomputed, recomputed_now, recomputing
from tread.kernels.offload.call import set_compiled_code
from tread.routing import noise
from tread.routing.budget import SHAPE_LEVELS
from tread.routing.handle import Handle
from tread.routing.plan import RoutePlan
from tread.words import counted

Switch = Literal["auto"] | bool
ANY_SHAPE = 4
"""Variants of the code for any shape: rotary embeddings of all samples or of each, with a mask or without."""


def compiles(setting: Switch, device: torch.device) -> bool:
    """Whether to compile; `auto` compiles on a GPU."""
    return device.type == "cuda" if setting == "auto" else setting


def lengths(plan: RoutePlan | None, *, masked: bool = False) -> int:
    """The number of sequence lengths a layer may see for one input size; `masked`: force masks are used.

    >>> lengths(RoutePlan.from_config({"preset": "paper"}))
    2
    """
    if plan is None:
        return 1
    levels = plan.schedule.levels if plan.schedule is not None and plan.schedule.warmup_steps else 1
    routed = len({route.selection_ratio for route in plan.routes}) * levels
    return 1 + routed + (SHAPE_LEVELS if masked else 0)


def compile_layers(
    layers: Sequence[nn.Module],
    *,
    shapes: int,
    checkpointed: Checkpointing | None = False,
    handles: Sequence[Handle] = (),
    training_only: bool = False,
    say: Callable[[str], None] = print,
    **options: Any,
) -> "Attempt":
    """Compile each layer in place, for up to `shapes` shapes of its inputs; `options` are torch.compile's.

    `checkpointed` is the activation checkpointing of each layer; None leaves it to the caller of `CompiledLayer`,
    "dense" asks the `handles` that route the model. With `training_only`, layers in eval mode run eager: validation has
    other shapes. The returned `Attempt` tells whether compiling failed.
    """
    from torch._functorch import config as lowering  # takes a second to import

    classes = len({type(layer) for layer in layers})
    # all classes share one code object; twice, because the first layer's input may need no gradient
    raise_recompile_limit(2 * classes * (shapes + ANY_SHAPE))
    lowering.force_non_lazy_backward_lowering = True
    attempt = Attempt(say, shapes=shapes, training_only=training_only)
    for layer in layers:
        set_compiled_code(layer, CompiledLayer(layer, attempt, checkpointed, options, handles))
    say(f"{counted(len(layers), 'layer')} will be compiled when first run, for up to {counted(shapes, 'shape')} each.")
    return attempt


def raise_recompile_limit(needed: int) -> None:
    """Raise torch's limits so that one function may be compiled at least `needed` times."""
    from torch._dynamo import config as limits  # takes a second to import

    limits.recompile_limit = max(needed, limits.recompile_limit)
    limits.accumulated_recompile_limit = max(needed, limits.accumulated_recompile_limit)


def compile_noise(attempt: "Attempt") -> None:
    """Compile `noise.draw_two` for the process; the bits stay the same."""
    eager = noise.two_uniforms
    noise.draw_two = Compiled(eager, torch.compile(eager, dynamic=False), attempt)


class Attempt:
    """The state of compilation that all layers of a model share: whether it failed, and the shapes seen so far."""

    def __init__(self, say: Callable[[str], None], *, shapes: int = 1, training_only: bool = False) -> None:
        self.failed, self.training_only = False, training_only
        self._say, self._most, self._seen = say, shapes, dict[Any, set[Any]]()
        self._told = False

    def fail(self, error: Exception) -> None:
        """Run everything eager from now on, and report the first error."""
        if not self.failed:
            cause = getattr(error, "inner_exception", error)  # the outer one adds a page about the backend
            reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
            self._say(f"compiling failed, so the run goes on without it, slower ({reason}).")
        self.failed = True

    def admit(self, variant: Any, shape: Any) -> bool:
        """Whether layers of one variant (class, checkpointing) get code of their own for this shape; counts it."""
        seen = self._seen.setdefault(variant, set())
        if shape in seen:
            return True
        if len(seen) < self._most:
            seen.add(shape)
            return True
        if not self._told:
            self._told = True
            self._say(f"layers saw more than {self._most} shapes: further ones share code for any shape, slower.")
        return False


class Compiled:
    """A compiled function that falls back to the eager one if compiling fails."""

    def __init__(self, eager: Callable[..., Any], compiled: Any, attempt: Attempt) -> None:
        from torch._dynamo.exc import TorchDynamoException

        self._eager, self._compiled, self.attempt, self._errors = eager, compiled, attempt, TorchDynamoException

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.attempt.failed:
            try:
                return self._compiled(*args, **kwargs)
            except self._errors as error:
                self.attempt.fail(error)
        return self._eager(*args, **kwargs)


class CompiledLayer:
    """A layer's compiled code: checkpointed or not, for one shape or for any.

    `checkpointed` None: the caller decides, by calling this or `checkpoint`.
    """

    def __init__(
        self,
        layer: nn.Module,
        attempt: Attempt,
        checkpointed: Checkpointing | None,
        options: dict[str, Any],
        handles: Sequence[Handle] = (),
    ) -> None:
        self.layer, self.attempt = layer, attempt
        self.checkpointed: Checkpointing | None = checkpointed
        self._options, self._code = options, dict[tuple[Recomputed, bool], Compiled]()
        self._handles = handles

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(False if self.checkpointed is None else self._now(self.checkpointed), args, kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, not checkpointed."""
        return self._run(False, args, kwargs)

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, checkpointed if `checkpointed` does not forbid it."""
        return self._run(True if self.checkpointed is None else self._now(self.checkpointed), args, kwargs)

    def _now(self, how: Checkpointing) -> Recomputed:
        return recomputed_now(how, self._handles)

    def _run(self, checkpointed: Recomputed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        attempt, layer = self.attempt, self.layer
        if attempt.training_only and not layer.training:
            return layer._call_impl(*args, **kwargs)
        counts = torch.is_grad_enabled() and not attempt.failed  # validation's shapes do not count towards the limit
        variant = type(layer), checkpointed  # if only some layers are offloaded, only those are checkpointed
        has_own_code = not counts or attempt.admit(variant, _shapes(args, kwargs))
        return self._variant(checkpointed, any_shape=not has_own_code)(*args, **kwargs)

    def _variant(self, checkpointed: Recomputed, *, any_shape: bool) -> Compiled:
        key = checkpointed, any_shape
        if key not in self._code:
            call = self.layer._call_impl
            compiler: Any = partial(torch.compile, dynamic=any_shape, **self._options)
            if checkpointed and _is_sharded(self.layer):  # checkpointed around the compiled code
                eager = partial(recomputing(checkpointed), call)
                compiled = partial(recomputing(checkpointed), compiler(call))
            else:
                eager = partial(recomputing(checkpointed, compiled=True), call) if checkpointed else call
                compiled = compiler(eager)
            self._code[key] = Compiled(eager, compiled, self.attempt)
        return self._code[key]


def _is_sharded(layer: nn.Module) -> bool:
    """Whether FSDP2 has hooks on the layer: torch 2.13 compiles nothing of a checkpointed function that runs them."""
    from torch.distributed.fsdp import FSDPModule  # takes half a second to import

    return isinstance(layer, FSDPModule)


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The shapes of the tensors among a layer's arguments."""
    return tuple(x.shape for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
