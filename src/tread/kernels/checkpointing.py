"""Activation checkpointing: what a layer saves for backward, and what backward recomputes.

- `true` saves only the inputs and recomputes everything (Chen et al. 2016, arXiv 1604.06174).
- `selective` also saves the expensive results: matrix products and attention. Norms, modulation, rotary positions,
  activations and the small products of a LoRA are recomputed: on FLUX a quarter less memory for 3 % of the time
  (docs/performance.md).
- `dense` is `true` in forwards that drop fewer tokens than the plan says, the warm-up and cool-down of a schedule, and
  `false` in all others: routed steps need less memory, so they need not pay for it in time.
- Gradients are unchanged, and the recomputation draws the same random numbers.
- Compiled or eager, it is torch's `checkpoint` with a policy. The compile cache on disk is keyed by a hash of this
  file.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tread.around import around, module_of
from tread.kernels.offload.call import unless_offloaded
from tread.routing.handle import Handle

Checkpointing = bool | Literal["selective", "dense"]
Recomputed = bool | Literal["selective"]
"""What one forward recomputes."""

LEAST = 256
"""Products with a shorter inner dimension are recomputed: a LoRA's, and attention scores."""
PRODUCTS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::baddbmm": 1,
    "aten::_scaled_mm": 0,
    "bitsandbytes::gemm_4bit": 0,
    "bitsandbytes::int8_scaled_mm": 0,
    "bitsandbytes::int8_mixed_scaled_mm": 0,
}
"""Operator name -> index of the argument whose last axis is the inner dimension."""
ATTENTION = ("tread::attention", "aten::_scaled_dot_product")
"""Prefixes of the names of attention operators."""


def recomputed_now(how: Checkpointing, handles: Sequence[Handle]) -> Recomputed:
    """What a forward recomputes now, in a model routed by these handles; without any it is dense."""
    if how == "dense":
        return not (handles and all(handle.at_full_ratio for handle in handles))
    return how


def recomputing(how: Checkpointing, *, compiled: bool = False) -> Callable[..., Any]:
    """A function `(layer, *args)` that calls the layer checkpointed; `compiled` if it runs inside compiled code.

    With `dense` the layer is one of an attached model, and eager.
    """
    if how == "dense":
        return _recompute_unless_routed
    if how == "selective":
        return partial(checkpoint, use_reentrant=False, context_fn=_save_expensive)
    # before torch 2.12, compiled code saves results of autograd functions, such as products with packed weights
    if compiled and TorchVersion(torch.__version__) < "2.12":
        return partial(checkpoint, use_reentrant=False, context_fn=_save_nothing)
    return partial(checkpoint, use_reentrant=False)


def checkpoint_layers(layers: Iterable[nn.Module], how: Checkpointing) -> None:
    """Checkpoint each layer in its own `forward`, for a model whose checkpointing leaves arguments of layers out."""
    for layer in layers:
        layer.forward = wraps(layer.forward)(partial(unless_offloaded(recomputing(how)), layer.forward))


def _recompute_unless_routed(call: Any, *args: Any, **kwargs: Any) -> Any:
    attached = around(module_of(call))
    handle: Handle | None = getattr(attached, "handle", None)
    if recomputed_now("dense", [] if handle is None else [handle]):
        return checkpoint(call, *args, use_reentrant=False, **kwargs)
    return call(*args, **kwargs)


def _is_expensive(name: str, args: tuple[Any, ...]) -> bool:
    if name in PRODUCTS:
        return args[PRODUCTS[name]].shape[-1] >= LEAST
    if name == "aten::convolution":
        return args[1].shape[1:].numel() >= LEAST
    return name.startswith(ATTENTION)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    expensive = _is_expensive(operator.name(), args)
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def _save_expensive() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _save_nothing() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


for _contexts in (_save_expensive, _save_nothing):  # without it, torch does not cache
    _contexts.__dict__["cache_hash"] = _contexts.__name__ + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
# torch warns about in-place operations once, even if there are none; compiled code has none
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())
