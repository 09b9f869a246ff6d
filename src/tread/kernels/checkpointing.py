"""What a layer keeps for its backward pass, and what it computes again: activation checkpointing.

- `true` keeps the inputs alone and computes everything again (Chen et al. 2016, arXiv 1604.06174).
- `selective` also keeps what is dear: the results of matrix products and of attention. Norms, modulation, rotary
  positions, activations and the small products of a LoRA are computed again: on FLUX a quarter less to keep, for 3 % of
  the time (docs/performance.md).
- Gradients are those of the layer as it is, and random numbers are drawn again.
- Compiled or not, it is torch's `checkpoint` with a policy. Compiled code is cached on disk by a hash of this file.
"""

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Checkpointing = bool | Literal["selective"]

LEAST = 256
"""Products that sum over fewer numbers are cheap for what they give: a LoRA's, and the scores of attention."""
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
"""By name, the argument whose last axis is summed over."""
ATTENTION = ("tread::attention", "aten::_scaled_dot_product")
"""How the names of its operators begin."""


def recomputing(how: Checkpointing, *, compiled: bool = False) -> Callable[..., Any]:
    """A function that calls a layer, its first argument, with the others; `compiled`: inside compiled code."""
    if how == "selective":
        return partial(checkpoint, use_reentrant=False, context_fn=_dear_is_kept)
    # torch before 2.12 keeps what a function with its own gradient computes, such as a product with packed weights
    if compiled and TorchVersion(torch.__version__) < "2.12":
        return partial(checkpoint, use_reentrant=False, context_fn=_nothing_is_kept)
    return partial(checkpoint, use_reentrant=False)


def _is_dear(name: str, args: tuple[Any, ...]) -> bool:
    if name in PRODUCTS:
        return args[PRODUCTS[name]].shape[-1] >= LEAST
    if name == "aten::convolution":
        return args[1].shape[1:].numel() >= LEAST
    return name.startswith(ATTENTION)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    dear = _is_dear(operator.name(), args)
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def _dear_is_kept() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _nothing_is_kept() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


for _contexts in (_dear_is_kept, _nothing_is_kept):  # without a name for what they do, nothing is cached
    _contexts.__dict__["cache_hash"] = _contexts.__name__ + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
# torch warns of operations in place, once, whether there are any or not; compiled code has none
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())
