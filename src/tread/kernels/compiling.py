"""Compiling the layers of a model, one by one, and the noise of a step, for every trainer.

- At static shapes. Routing adds lengths to the dense one, as many as the plan says and no more; torch's limit on
  recompilations, beyond which it would silently run layers as they are, is raised to that number.
- Where compiling fails (no C compiler, an operation that cannot be compiled), the layer's own code runs in its place,
  in this call and in all later ones of every layer: one sentence says so, and the run goes on. The backward pass is
  compiled together with the forward, so that no step fails halfway.
- Checkpointing is compiled with the layer: its backward computes again what was not kept (`checkpointing.py`),
  but for what no gradient needs. Around compiled code, torch's checkpointing would cost the host more than routing
  saves the device (docs/performance.md).
- A layer keeps its parameter names and its hooks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from tread.kernels.checkpointing import Checkpointing, recomputing
from tread.routing import noise
from tread.routing.plan import RoutePlan
from tread.routing.selection import SHAPE_LEVELS

Switch = Literal["auto"] | bool


def compiles(setting: Switch, device: torch.device) -> bool:
    """What `auto` means: on a GPU."""
    return device.type == "cuda" if setting == "auto" else setting


def lengths(plan: RoutePlan | None, *, masked: bool = False) -> int:
    """How many lengths of the stream a layer may see for one size of the input; `masked`: tokens are forced by masks.

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

    With `checkpointed`, a layer keeps less for its backward pass. Returns how it goes, which the first steps will show.
    """
    from torch._dynamo import config as limits  # a second to import, which only those who compile need
    from torch._functorch import config as lowering

    kinds = len({type(layer) for layer in layers})
    # kinds share one code object, and a first layer's input may need no gradient where the others' do
    needed = 2 * kinds * shapes
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
    """Compile what the noise of a step is made of, for the process; the bits stay the same."""
    own = noise.two_uniforms
    noise.draw_two = Compiled(own, torch.compile(own, dynamic=False), attempt)


class Attempt:
    """Whether compiling works here; what all layers of a model share."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.failed, self._say = False, say

    def fail(self, error: Exception) -> None:
        """From now on, nothing is compiled."""
        if not self.failed:
            cause = getattr(error, "inner_exception", error)  # the compiler's own, without a page about the backend
            reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
            self._say(f"compiling failed, so the run goes on without it, slower ({reason}).")
        self.failed = True


class Compiled:
    """A compiled function, or the function itself where compiling fails."""

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
