"""Masks of attention as a bias, which is added to the scores of queries and keys.

- `additive` is an operator that the compiler does not look into. A boolean mask is turned into a bias by torch's
  attention too, but code compiled to recompute a layer then writes it once for every head and query: 11 GiB where the
  mask has one number for a key (docs/log.md).
- A query that may look at nothing, which is padding that nobody reads, looks at every key instead: with a low number in
  its whole row cuDNN's gradient is not a number.
"""

import torch
from torch import Tensor
from torch.library import custom_op

BLOCKED = -(2.0**15)
"""Added to the scores of blocked keys: their weight is 0, and every dtype of attention has this number."""
ALIGNED = 8
"""Kernels need rows of masks that begin at a multiple of so many numbers."""


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: 0 where a boolean mask is true and a low number elsewhere, or the mask itself.

    >>> bias_of(torch.tensor([True, False]), torch.float16)
    tensor([     0., -32768.], dtype=torch.float16)
    """
    keys = mask.shape[-1]
    bias = mask.new_zeros(*mask.shape[:-1], -(-keys // ALIGNED) * ALIGNED, dtype=dtype)[..., :keys]
    if mask.dtype != torch.bool:
        return bias.copy_(mask)
    return bias.masked_fill_(~mask & mask.any(-1, keepdim=True), BLOCKED)


@custom_op("tread::additive", mutates_args=())
def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`bias_of` a boolean mask."""
    return bias_of(mask, dtype).contiguous()


@additive.register_fake
def _(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask.new_empty(mask.shape, dtype=dtype)
