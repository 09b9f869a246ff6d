"""`torch.compile` for the layers of a model, one by one, and for the noise of a step.

- Shapes are static. Routing adds sequence lengths to the dense one, a number that the plan determines; torch's
  recompile limit, beyond which it would silently run eager code, is raised to it.
- If compiling fails (no C compiler, an unsupported operation), every layer runs eager from then on; one message says
  so. The backward is compiled together with the forward, so that no step fails halfway.
- Checkpointing is compiled with the layer (`checkpointing.py`). Torch's checkpointing around compiled code would cost
  the host more time than routing saves the device (docs/performance.md).
- A layer keeps its parameter names and its hooks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from tread.kernels.checkpointing import Checkpointing, recomputing
from tread.routing import noise
from tread.routing.budget import SHAPE_LEVELS
from tread.routing.plan import RoutePlan

Switch = Literal["auto"] | bool


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
    checkpointed: Checkpointing = False,
    say: Callable[[str], None] = print,
    **options: Any,
) -> "Attempt":
    """Compile each layer in place, for up to `shapes` shapes of its inputs; `options` are torch.compile's.

    `checkpointed` is the activation checkpointing of each layer. The returned `Attempt` tells whether compiling failed.
    """
    from torch._dynamo import config as limits  # takes a second to import
    from torch._functorch import config as lowering

    classes = len({type(layer) for layer in layers})
    # all classes share one code object; twice, because the first layer's input may need no gradient
    needed = 2 * classes * shapes
    limits.recompile_limit = max(needed, limits.recompile_limit)
    limits.accumulated_recompile_limit = max(needed, limits.accumulated_recompile_limit)
    lowering.force_non_lazy_backward_lowering = True
    attempt, recompute = Attempt(say), recomputing(checkpointed, compiled=True)
    for layer in layers:
        own = partial(recompute, layer._call_impl) if checkpointed else layer._call_impl
        layer._compiled_call_impl = Compiled(own, torch.compile(own, dynamic=False, **options), attempt)
    say(f"{len(layers)} layers are compiled when they first run, for up to {shapes} shape(s) each.")
    return attempt


def compile_noise(attempt: "Attempt") -> None:
    """Compile `noise.draw_two` for the process; the bits stay the same."""
    own = noise.two_uniforms
    noise.draw_two = Compiled(own, torch.compile(own, dynamic=False), attempt)


class Attempt:
    """Whether compiling has failed, shared by all layers of a model."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.failed, self._say = False, say

    def fail(self, error: Exception) -> None:
        """Run everything eager from now on, and report the first error."""
        if not self.failed:
            cause = getattr(error, "inner_exception", error)  # without the page about the backend
            reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
            self._say(f"compiling failed, so the run goes on without it, slower ({reason}).")
        self.failed = True


class Compiled:
    """A compiled function that falls back to the eager one if compiling fails."""

    def __init__(self, own: Callable[..., Any], compiled: Any, attempt: Attempt) -> None:
        from torch._dynamo.exc import TorchDynamoException

        self.own, self.compiled, self.attempt, self.errors = own, compiled, attempt, TorchDynamoException

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.attempt.failed:
            try:
                return self.compiled(*args, **kwargs)
            except self.errors as error:
                self.attempt.fail(error)
        return self.own(*args, **kwargs)
