"""Activation checkpointing: what a layer saves for backward, and what backward recomputes.

- `true` saves only the inputs and recomputes everything (Chen et al. 2016, arXiv 1604.06174).
- `selective` also saves the expensive results: matrix products and attention. Norms, modulation, rotary positions,
  activations and the small products of a LoRA are recomputed: on FLUX a quarter less memory for 3 % of the time
  (docs/performance.md).
- Gradients are unchanged, and the recomputation draws the same random numbers.
- Compiled or eager, it is torch's `checkpoint` with a policy. The compile cache on disk is keyed by a hash of this
  file.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tread.kernels.offload.call import unless_offloaded

Checkpointing = bool | Literal["selective"]

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


def recomputing(how: Checkpointing, *, compiled: bool = False) -> Callable[..., Any]:
    """A function `(layer, *args)` that calls the layer checkpointed; `compiled` if it runs inside compiled code."""
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
