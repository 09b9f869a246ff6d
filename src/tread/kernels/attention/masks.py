"""Masks of attention as a bias, which is added to the scores of queries and keys.

- `additive` is an operator that the compiler does not look into. A boolean mask is turned into a bias by torch's
  attention too, but code compiled to recompute a layer then writes it once for every head and query: 11 GiB where the
  mask has one number for a key (docs/log.md).
- The result of a query that may look at nothing is 0, as in torch. A finite number instead of minus infinity makes it
  attend to every key alike, for which cuDNN computes gradients that are not numbers.
"""

import torch
from torch import Tensor
from torch.library import custom_op

ALIGNED = 8
"""Kernels need rows of masks that begin at a multiple of so many numbers."""


def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: 0 where a boolean mask is true and minus infinity elsewhere, or the mask itself.

    >>> bias_of(torch.tensor([True, False]), torch.float16)
    tensor([0., -inf], dtype=torch.float16)
    """
    keys = mask.shape[-1]
    bias = mask.new_zeros(*mask.shape[:-1], -(-keys // ALIGNED) * ALIGNED, dtype=dtype)[..., :keys]
    if mask.dtype != torch.bool:
        return bias.copy_(mask)
    return bias.masked_fill_(~mask, -float("inf"))


@custom_op("tread::additive", mutates_args=())
def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`bias_of` a boolean mask."""
    return bias_of(mask, dtype).contiguous()


@additive.register_fake
def _(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask.new_empty(mask.shape, dtype=dtype)
